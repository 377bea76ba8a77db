"""How a capture or another long task is doing, in plain lines that a log file can hold."""

from __future__ import annotations

import time
from collections.abc import Callable

INTERVAL_S = 5.0


class Progress:
    """A line of units done, speed and time left, about every five seconds and at the end."""

    def __init__(
        self,
        total: int,
        log: Callable[[str], None],
        name: str = "capture",
        unit: str = "tokens",
        more: Callable[[], str] = lambda: "",
    ) -> None:
        """Start the clock for ``total`` units of the task ``name``; ``more`` ends every line."""
        self._total, self._log, self._name, self._unit = total, log, name, unit
        self._more = more
        self._done = 0
        self._start = self._last = time.monotonic()

    def extend(self, units: int) -> None:
        """More is to do than was known."""
        self._total += units

    def add(self, units: int) -> None:
        """Count finished units."""
        self._done += units
        now = time.monotonic()
        if now - self._last < INTERVAL_S and self._done < self._total:
            return
        self._last = now
        rate = self._done / max(now - self._start, 1e-9)
        left = int((self._total - self._done) / rate)
        speed = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
        self._log(
            f"{self._name}: {self._done:,} of {self._total:,} {self._unit} "
            f"({self._done / self._total:.0%}), {speed} {self._unit}/s, "
            f"{left // 60}:{left % 60:02d} left{self._more()}"
        )


def print_line(line: str) -> None:
    """Print at once, also when standard output is a file."""
    print(line, flush=True)


def size(num_bytes: float) -> str:
    """Bytes for people."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
