"""Warnings that somebody should see who does not look at the terminal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import Any

_QUIET_S = 600.0
"""After an alert of a kind, further ones of that kind wait so long."""


class AlertKind(StrEnum):
    """What an alert is about; the value is its title on the dashboard."""

    non_finite = "loss or gradient not finite"
    gradient_norm = "gradient norm far above its median"
    no_step = "no optimizer step"
    data_wait = "training waits for data"
    acceptance = "replay acceptance falls"
    disk = "disk almost full"


class Alerts:
    """Prints a warning as one line and sends it to W&B; at most one of a kind in ten minutes.

    Args:
        wandb_run: the live run; null: alerts are only printed.
        clock: seconds from any origin, never running backwards.
    """

    def __init__(self, wandb_run: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._wandb_run = wandb_run
        self._clock = clock
        self._sent_at: dict[AlertKind, float] = {}
        self._held_back: Counter[AlertKind] = Counter()

    def send(self, kind: AlertKind, line: str, *, printed: bool = False) -> None:
        """Tell it now, or count it for the next of its kind.

        Args:
            line: begins with ``warning:``.
            printed: it stands in the log already.
        """
        now = self._clock()
        if now - self._sent_at.get(kind, -_QUIET_S) < _QUIET_S:
            self._held_back[kind] += 1
            return
        self._sent_at[kind] = now
        more = self._held_back.pop(kind, 0)
        if more:
            line += f" ({more} more like it since the last such warning)"
        if not printed:
            print(line, flush=True)
        if self._wandb_run is not None:
            try:
                self._wandb_run.alert(kind.value, line.removeprefix("warning: "), level="WARN")
            except Exception as error:  # a dashboard must not end a run
                print(f"W&B took no alert ({type(error).__name__}: {error})", flush=True)
