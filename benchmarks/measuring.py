"""CPU seconds and peak memory of a call. Needs nothing but Linux and Python, in any environment."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

_PROCESS = Path("/proc/self")


@dataclass(frozen=True)
class Measurement:
    """What a call cost."""

    cpu_s: float
    """CPU seconds of all threads of this process, median of the repeats."""
    peak_bytes: int
    """Most resident memory during a repeat over that before it; the highest of the repeats."""


def measure(run: Callable[[], None], repeats: int) -> Measurement:
    """Call ``run`` once to warm up, then ``repeats`` times; what it leaves behind should not grow.

    Raises:
        OSError: not Linux, or ``/proc`` does not let a process reset its peak memory.
    """
    run()
    seconds, peaks = [], []
    for _ in range(repeats):
        before = reset_peak()
        started = time.process_time()
        run()
        seconds.append(time.process_time() - started)
        peaks.append(status_bytes("VmHWM") - before)
    return Measurement(median(seconds), max(peaks))


def reset_peak() -> int:
    """Give freed memory back to the system and forget the peak; bytes resident now.

    What a call frees stays with the allocator, and would hide as much of the next call's peak.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    (_PROCESS / "clear_refs").write_text("5")
    return status_bytes("VmRSS")


def status_bytes(field: str) -> int:
    for line in (_PROCESS / "status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}; expected Linux")
