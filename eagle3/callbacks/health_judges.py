"""When a figure is worth a warning: plain decisions that keep a little history."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

from eagle3.data.disk import size

_WINDOW = 100
_SEEN = 20
"""Gradient norms that make a median."""
_CALM_STEPS = 10
"""Ordinary steps in a row that end a burst."""
_FALLS = 3
_ROOM_FOR = 2
"""Checkpoints that should still fit."""


class GradientNorms:
    """Speaks at the first norm of a burst that is far above the median of the steps before.

    Outliers join the window, so that a level which stays becomes the ordinary one.

    Args:
        factor: times the median.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._calm = _CALM_STEPS

    def judge(self, step: int, norm: float, clip_norm: float) -> str | None:
        """The warning where one is due.

        Args:
            step: optimizer steps done, this one included.
            norm: of all gradients before clipping; one that is not finite is left out.
        """
        if not math.isfinite(norm):
            return None
        usual = median(self._recent) if len(self._recent) >= _SEEN else math.inf
        seen = len(self._recent)
        self._recent.append(norm)
        if norm <= self._factor * usual:
            self._calm += 1
            return None
        begins = self._calm >= _CALM_STEPS
        self._calm = 0
        if not begins:
            return None
        return (
            f"warning: the gradient norm of step {step} is {norm:.3g}, {norm / usual:.3g} times "
            f"the median of the {seen} steps before ({usual:.3g}); it was clipped to "
            f"optim.clip_norm={clip_norm:g}. Once is harmless; if it comes again, look at the "
            "documents of these steps, and lower lr"
        )


class FallingAcceptance:
    """Speaks when an acceptance length has fallen three validations in a row."""

    def __init__(self, values: Sequence[float] = ()) -> None:
        self.values = list(values)
        """The latest that may be the beginning of a fall, oldest first."""

    def judge(self, value: float) -> str | None:
        """Take the next value, and say the warning where one is due; NaN is left out."""
        if not math.isfinite(value):
            return None
        if self.values and value >= self.values[-1]:
            self.values = []
        self.values.append(value)
        if len(self.values) <= _FALLS:
            return None
        path = ", ".join(f"{v:.3f}" for v in self.values)
        self.values = self.values[-1:]
        return (
            f"warning: val/acceptance_replay fell {_FALLS} validations in a row ({path}); the best "
            "checkpoint is kept. If val/loss rises too, more epochs will not help "
            "(val.early_stop ends such a run); else lower lr"
        )


class DiskRoom:
    """Speaks when two checkpoints no longer fit, and again only once they had fitted."""

    def __init__(self) -> None:
        self._told = False

    def judge(self, free_bytes: int, checkpoint_bytes: int, where: str) -> str | None:
        """The warning where one is due.

        Args:
            checkpoint_bytes: of the last one that was written.
            where: folder whose disk has ``free_bytes``.
        """
        if free_bytes >= _ROOM_FOR * checkpoint_bytes:
            self._told = False
            return None
        if self._told:
            return None
        self._told = True
        return (
            f"warning: {size(free_bytes)} are free at {where} and a checkpoint takes "
            f"{size(checkpoint_bytes)}: fewer than {_ROOM_FOR} fit. Free some space, or the next "
            "save fails (training goes on then; after three failures it stops)"
        )
