"""How unequal the ranks' own work is, measured without what they wait for each other.

In a step that is measured, ranks meet at its start, so that none of the time after that is spent
waiting for a late one; the clock stops where the last backward begins, because in it gradients are
summed over ranks. So the time is that of all forwards and all backwards but the last::

    wait for data | meet | counts | forward ... forward | last backward and sum | optimizer
                         ^------- own time ------------^
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class OwnTime:
    """The stopwatch of one rank.

    Args:
        clock: seconds from any origin, never running backwards.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start: float | None = None
        self.seconds = 0.0

    def start(self, device: torch.device) -> None:
        """Meet the other ranks, then start."""
        gather([0.0], device)
        self._start = self._clock()

    def backward_begins(self, device: torch.device) -> None:
        """The last call before :meth:`stop` counts; does nothing in steps that are not measured."""
        if self._start is not None:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            self.seconds = self._clock() - self._start

    def stop(self) -> None:
        """End of the measured step."""
        self._start = None


def rank_skew(own_s: Tensor) -> float:
    """Largest over mean own time, [ranks]; 1.0 is perfect balance."""
    mean = float(own_s.mean())
    return float(own_s.max()) / mean if mean > 0 else 1.0


def gather(values: Sequence[float], device: torch.device) -> Tensor:
    """float64 [ranks, n], the values of every rank, on CPU. Every rank has to call it."""
    own = torch.tensor(values, dtype=torch.float64, device=device)
    if not several_ranks():
        return own[None].cpu()
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return torch.stack(parts).cpu()


def several_ranks() -> bool:
    """Whether there is another rank to be compared with."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
