"""Capture back ends: who computes the hidden states a drafter learns from."""

from eagle3.verifier.base import CapturedStates, Verifier, VerifierDescription, describe_verifier

__all__ = ["CapturedStates", "Verifier", "VerifierDescription", "describe_verifier"]
