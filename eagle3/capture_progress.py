"""How a capture is doing, in plain lines that a log file can hold."""

from __future__ import annotations

import time
from collections.abc import Callable

INTERVAL_S = 5.0


class Progress:
    """A line of tokens done, speed and time left, about every five seconds and at the end."""

    def __init__(self, total: int, log: Callable[[str], None]) -> None:
        """Start the clock for ``total`` tokens."""
        self._total, self._log = total, log
        self._done = 0
        self._start = self._last = time.monotonic()

    def add(self, tokens: int) -> None:
        """Count finished tokens."""
        self._done += tokens
        now = time.monotonic()
        if now - self._last < INTERVAL_S and self._done < self._total:
            return
        self._last = now
        rate = self._done / max(now - self._start, 1e-9)
        left = int((self._total - self._done) / rate)
        self._log(
            f"capture: {self._done:,} of {self._total:,} tokens ({self._done / self._total:.0%}), "
            f"{rate:,.0f} tokens/s, {left // 60}:{left % 60:02d} left"
        )


def print_line(line: str) -> None:
    """Print at once, also when standard output is a file."""
    print(line, flush=True)


def size(num_bytes: float) -> str:
    """Bytes for people."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
