"""Where the time of decoding goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from eagle3.names import DecodingPart


class Clock:
    """Seconds by part. On a GPU every part waits for the device, so that it pays for its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[DecodingPart, float] = defaultdict(float)

    @contextmanager
    def part(self, name: DecodingPart) -> Iterator[None]:
        """Add what runs inside to ``name``."""
        start = self._now()
        yield
        self.seconds[name] += self._now() - start

    @property
    def total(self) -> float:
        """Of all parts."""
        return sum(self.seconds.values())

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
