"""How far apart checkpoints by time are, so that saving takes a small share of a run."""

from __future__ import annotations

SAVING_SHARE = 0.02
"""Of a run's time, at most, that saves by time take."""


def pause_s(wanted_s: float, save_s: float) -> float:
    """Seconds from the end of a save to the next by time: ``wanted_s``, or more on a slow disk.

    A save of d seconds and a pause of p take the share d / (d + p), so p >= d (1 / share - 1).

    Args:
        save_s: seconds that the last save took.
    """
    return max(wanted_s, save_s * (1 / SAVING_SHARE - 1))
