"""One clear warning when training waits for data, and another only after it had recovered."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

STEPS = 20
"""Steps that must be seen before anything is said."""
WARN_ABOVE = 0.2
RECOVERED_BELOW = 0.1


@dataclass(frozen=True)
class Waiting:
    """Reading and waiting of one rank over some steps."""

    seconds: float = 0.0
    wait_s: float = 0.0
    """Part of it spent waiting for data."""
    read_bytes: float = 0.0
    rows: float = 0.0
    """Rows that the bytes were read for."""

    def __add__(self, other: Waiting) -> Waiting:
        return Waiting(
            self.seconds + other.seconds,
            self.wait_s + other.wait_s,
            self.read_bytes + other.read_bytes,
            self.rows + other.rows,
        )

    @property
    def share(self) -> float:
        """0 to 1."""
        return min(1.0, self.wait_s / self.seconds) if self.seconds > 0 else 0.0


class RecentWaiting:
    """Sums over the last :data:`STEPS` steps of this rank."""

    def __init__(self) -> None:
        self._recent: deque[Waiting] = deque(maxlen=STEPS)

    def add(self, step: Waiting) -> None:
        self._recent.append(step)

    def total(self) -> Waiting:
        """Nothing before that many steps were seen."""
        return sum(self._recent, Waiting()) if len(self._recent) == STEPS else Waiting()


class DataWaitAlarm:
    """Decides when to speak: above one limit, and again only once it was below a lower one."""

    def __init__(self) -> None:
        self._warned = False

    def judge(self, rank: int, waiting: Waiting) -> str | None:
        """The warning where it is due.

        Args:
            rank: the one that waits most.
            waiting: its :meth:`RecentWaiting.total`.
        """
        share = waiting.share
        if share < RECOVERED_BELOW:
            self._warned = False
        if self._warned or share <= WARN_ABOVE:
            return None
        self._warned = True
        gb_per_s = waiting.read_bytes / waiting.seconds / 1e9
        return (
            f"warning: training waits for data {share:.0%} of the time (mean of {STEPS} steps). "
            f"Rank {rank} reads {gb_per_s:.3g} GB/s, "
            f"{waiting.read_bytes / max(waiting.rows, 1):,.0f} bytes per token, and could use "
            f"{gb_per_s / max(1 - share, 0.01):.3g} GB/s. What helps, cheapest first: more reader "
            "threads (data.num_workers), another data.read_mode, a larger data.prefetch_windows "
            "where reading is uneven, a larger max_seq_len where documents are split (fewer "
            "context rows are read twice), a faster or local disk for paths.shards."
        )
