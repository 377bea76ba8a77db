"""Train EAGLE-3 drafters for speculative decoding from a frozen verifier's hidden states."""

__version__ = "0.1.0"
