"""How a long pass over files is doing, in plain lines that a log file can hold."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from eagle3.data.disk import size

INTERVAL_S = 5.0


class ByteProgress:
    """A line of bytes done, speed and time left, about every five seconds. Safe in threads."""

    def __init__(self, verb: str, total: int, log: Callable[[str], None]) -> None:
        """Start the clock for ``total`` bytes."""
        self._verb, self._log = verb, log
        self.total = total
        self._lock = threading.Lock()
        self._start = self._last = time.monotonic()
        self.done = 0

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start

    @property
    def rate(self) -> float:
        """Bytes per second so far."""
        return self.done / max(self.seconds, 1e-9)

    def add(self, num_bytes: int) -> None:
        """Count finished bytes."""
        with self._lock:
            self.done += num_bytes
            now = time.monotonic()
            if now - self._last < INTERVAL_S:
                return
            self._last = now
            left = int(max(self.total - self.done, 0) / max(self.rate, 1e-9))
            share = self.done / max(self.total, 1)
        self._log(
            f"{self._verb}: {size(self.done)} of {size(self.total)} ({share:.0%}), "
            f"{self.rate / 1e9:.2f} GB/s, {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left"
        )
