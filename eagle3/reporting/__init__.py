"""Comparing runs: which jobs a sweep had, which settings won, as tables and one picture."""
