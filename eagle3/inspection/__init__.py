"""Audit of a directory of captured states: what is in it, and whether training on it makes sense.

``run_audit`` (:mod:`eagle3.inspection.audit`) returns the facts and findings as one frozen object.
"""
