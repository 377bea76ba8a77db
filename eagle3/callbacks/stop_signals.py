"""Signals that ask a run to stop: noted at once, obeyed between two optimizer steps."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""A scheduler's, Ctrl-C, and Slurm's notice of pre-emption (``sbatch --signal=USR1@60``)."""
_ONE_PRESS_S = 1.0
"""A terminal and a launcher may both deliver the same Ctrl-C."""


class StopSignals:
    """Whether one of :data:`STOPPING` came to this process since :meth:`install`.

    A second SIGINT raises KeyboardInterrupt on the spot. Signals that were ignored before (nohup,
    background jobs) stay ignored.

    Args:
        clock: seconds from any origin, never running backwards.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.received: signal.Signals | None = None
        self._clock = clock
        self._interrupted_at: float | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """Take the signals over; outside the main thread, where Python forbids it, do nothing."""
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in STOPPING:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._previous[signum] = signal.signal(signum, self._note)

    def restore(self) -> None:
        """Give them back."""
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous = {}

    def _note(self, signum: int, frame: FrameType | None) -> None:
        now = self._clock()
        if self.received is None:
            self.received = signal.Signals(signum)
            # print could meet itself in the middle of a line here
            text = f"\n{self.received.name}: the run is saved and ends after the present step\n"
            os.write(2, text.encode())
        if signum == signal.SIGINT:
            if self._interrupted_at is None:
                self._interrupted_at = now
            elif now - self._interrupted_at > _ONE_PRESS_S:
                raise KeyboardInterrupt
