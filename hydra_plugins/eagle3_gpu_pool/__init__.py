"""Hydra finds launchers in the namespace ``hydra_plugins`` only; the work is in eagle3.pool."""
