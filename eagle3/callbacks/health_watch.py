"""A thread beside training: ``heartbeat.json``, and a word when no step comes.

It writes also while a step hangs, so the file tells a run that stands still (its ``time`` is
recent) from one that is gone (its ``time`` is old and ``status`` is still ``running``).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from eagle3.callbacks.health_alerts import AlertKind, Alerts
from eagle3.run_folder import HEARTBEAT_FILE, STACKS_FILE, write_json

_PATIENCE_S = 5.0
"""A disk that no longer answers must not keep the run from ending."""


@dataclass(frozen=True)
class Standing:
    """Where training stands after its latest step."""

    step: int
    """Optimizer steps done."""
    total_steps: int
    epoch: float
    loss: float | None = None
    """Of the latest step; null: none yet."""
    eta_s: float | None = None
    """Seconds of training left; null: no step yet."""


class HealthWatch:
    """Writes the heartbeat of a run and warns once of each standstill.

    Args:
        stall_s: without a sign of life for so long, it warns and writes the stacks of all threads.
        every_s: between two looks.
        also: called at each look.
        clock: seconds from any origin, never running backwards.
    """

    def __init__(
        self,
        run_dir: Path,
        alerts: Alerts,
        *,
        stall_s: float,
        every_s: float,
        also: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_dir = run_dir
        self._alerts = alerts
        self._stall_s = stall_s
        self._every_s = every_s
        self._also = also
        self._clock = clock
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._standing: Standing | None = None
        self._signed_at = 0.0
        self._told_at: float | None = None

    def start(self, standing: Standing) -> None:
        """Begin to write, at once and then regularly."""
        self.sign(standing)
        self._ended.clear()
        self._write("running")
        self._thread = threading.Thread(target=self._watch, name="health", daemon=True)
        self._thread.start()

    def sign(self, standing: Standing | None = None) -> None:
        """A sign of life; with where training stands now, if that changed."""
        if standing is not None:
            self._standing = standing
        self._signed_at = self._clock()

    def stop(self) -> None:
        """End the thread and say so in the file; a second call does nothing."""
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join(timeout=_PATIENCE_S)
        self._thread = None
        self._write("ended")

    def _watch(self) -> None:
        while not self._ended.wait(self._every_s):
            self._look()

    def _look(self) -> None:
        signed_at = self._signed_at
        silent_s = self._clock() - signed_at
        stalled = silent_s >= self._stall_s
        self._write("stalled" if stalled else "running")
        if stalled and self._told_at != signed_at:
            self._told_at = signed_at
            self._tell(silent_s)
        self._also()

    def _tell(self, silent_s: float) -> None:
        assert self._standing is not None
        stacks = self._run_dir / STACKS_FILE
        with contextlib.suppress(OSError), stacks.open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file)
        self._alerts.send(
            AlertKind.no_step,
            f"warning: no step for {silent_s / 60:.3g} minutes, the last was "
            f"{self._standing.step} of {self._standing.total_steps}; {stacks} shows where this "
            "process (rank 0) stands. Look for a slow disk, a card that is busy with something "
            "else, or another rank that hangs; killed and started with resume=auto, the run goes "
            "on from its newest checkpoint",
        )

    def _write(self, status: str) -> None:
        assert self._standing is not None
        content = {
            "status": status,
            **asdict(self._standing),
            "seconds_since_step": round(self._clock() - self._signed_at, 1),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        temporary = f".{HEARTBEAT_FILE}.tmp"
        with contextlib.suppress(OSError):  # of a full disk, others tell
            write_json(self._run_dir, temporary, content)
            (self._run_dir / temporary).replace(self._run_dir / HEARTBEAT_FILE)
