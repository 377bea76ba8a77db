"""Speculative decoding with a chain of drafts, without a change to what the verifier would say."""
