"""Rehearsals: an experiment's own run on a narrow model and made-up states, on CPU.

``reduction`` says what changes in the configuration, ``lengths`` how long the documents are,
``world`` writes verifier, states and vocabulary map, ``staging`` does all three, and ``table`` says
in the end what the run has shown and what it has not.
"""
