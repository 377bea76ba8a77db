"""Keys and values of several sequences, each with a length of its own.

Every sequence writes from its own length on, so what a round has drafted in vain is overwritten by
the next one: nothing is rolled back, and nobody reads it, since a token sees places up to its own.

::

    sequence 0   [ a0 a1 a2 a3 | d1 d2 .. ]     length 4, then drafts
    sequence 1   [ b0 b1 | d1 d2 .. .. .. ]     length 2
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

Places = Int[Tensor, "B n"]


class KeyValues:
    """One layer's cache of B sequences, allocated at its first use."""

    def __init__(self, capacity: int) -> None:
        """``capacity``: places of a sequence."""
        self._capacity = capacity
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def put(self, keys: Tensor, values: Tensor, places: Places, stop: int) -> tuple[Tensor, Tensor]:
        """Write n tokens of each sequence and return what is there.

        Args:
            keys, values: [B, heads, n, D], their D may differ.
            places: where they go, int64 [B, n], all below ``stop``.
            stop: one after the last place in use.

        Returns:
            [B, heads, stop, D] each, views of the cache.
        """
        if self._keys is None or self._values is None:
            self._keys, self._values = (self._like(each) for each in (keys, values))
        rows = torch.arange(len(places), device=places.device)[:, None]
        self._keys[rows, :, places] = keys.transpose(1, 2)
        self._values[rows, :, places] = values.transpose(1, 2)
        return self._keys[:, :, :stop], self._values[:, :, :stop]

    def select(self, rows: Int[Tensor, " R"]) -> None:
        """Keep these sequences only."""
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys[rows], self._values[rows]

    def _like(self, states: Tensor) -> Tensor:
        # zeros, since a place between two sequences' lengths is multiplied by a weight of zero
        return states.new_zeros(*states.shape[:2], self._capacity, states.shape[-1])


def visible(places: Places, stop: int, window: int | None = None) -> Bool[Tensor, "B 1 n stop"]:
    """Which places a token at each of ``places`` attends to: those up to its own."""
    there = torch.arange(stop, device=places.device)
    seen = there <= places[:, :, None]
    if window is not None:
        seen &= places[:, :, None] - there < window
    return seen[:, None]
