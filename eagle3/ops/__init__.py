"""Operators with a plain reference beside each fast implementation, chosen by name."""
