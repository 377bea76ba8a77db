"""Which tokens are supervised, as runs: compact enough to keep for every document of a directory.

A run ``[a, b)`` of supervised tokens gates the rows ``[a - 1, b - 1)``, because row i is gated by
token i + 1 (see :mod:`eagle3.data.batch`); a supervised token 0 gates nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from eagle3.names import TrainOn

if TYPE_CHECKING:  # the processes that probe files use this module, and need no torch
    from jaxtyping import Bool
    from torch import Tensor


def supervised_runs(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Bounds [R, 2] of the runs of ones in ``mask`` [n]."""
    padded = np.zeros(len(mask) + 2, np.bool_)
    padded[1:-1] = mask
    return np.flatnonzero(padded[1:] != padded[:-1]).reshape(-1, 2)


def apply_train_on(loss_mask: Bool[Tensor, " N"], train_on: TrainOn) -> Bool[Tensor, " N"]:
    """The captured mask, all ones, or only its last run of ones."""
    if train_on is TrainOn.all:
        return loss_mask.new_ones(loss_mask.shape)
    if train_on is TrainOn.assistant:
        return loss_mask
    last_turn = loss_mask.new_zeros(loss_mask.shape)
    for start, stop in supervised_runs(loss_mask.numpy())[-1:]:
        last_turn[start:stop] = True
    return last_turn


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of D documents: those of document d are ``bounds[offsets[d]:offsets[d + 1]]``."""

    offsets: NDArray[np.int64]
    """[D + 1]"""
    bounds: NDArray[np.int64]
    """[R, 2]"""

    @classmethod
    def concatenate(cls, parts: Sequence[Runs]) -> Runs:
        """The documents of several, one after another."""
        sizes = np.concatenate([np.diff(part.offsets) for part in parts])
        bounds = np.concatenate([part.bounds for part in parts])
        return cls(np.concatenate([[0], np.cumsum(sizes)]), bounds)

    @classmethod
    def stack(cls, runs: Iterable[NDArray[np.int64]]) -> Runs:
        """Join the runs of single documents."""
        parts = list(runs)
        sizes = [len(part) for part in parts]
        empty = np.zeros((0, 2), np.int64)
        return cls(np.cumsum([0, *sizes], dtype=np.int64), np.concatenate([empty, *parts]))

    def totals(self) -> NDArray[np.int64]:
        """Members of the runs of each document, [D]."""
        cumulated = np.concatenate([[0], np.cumsum(self.bounds[:, 1] - self.bounds[:, 0])])
        return (cumulated[self.offsets[1:]] - cumulated[self.offsets[:-1]]).astype(np.int64)

    def count(
        self,
        documents: NDArray[np.int64],
        starts: NDArray[np.signedinteger],
        stops: NDArray[np.signedinteger],
    ) -> NDArray[np.int64]:
        """Members of the runs of ``documents[i]`` within ``[starts[i], stops[i])``, all [N]."""
        cumulated = np.concatenate([[0], np.cumsum(self.bounds[:, 1] - self.bounds[:, 0])])
        # One key sorts the runs of all documents, so that a search finds those before a place.
        width = int(self.bounds.max(initial=0)) + 1
        keys = np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets)) * width
        keys += self.bounds[:, 0]
        ends = np.append(self.bounds[:, 1], 0)

        def members_before(places: NDArray[np.signedinteger]) -> NDArray[np.int64]:
            places = np.minimum(places, width - 1)
            runs = np.searchsorted(keys, documents * width + places)
            # The last of these runs may reach past the place; with none the key -1 is not used.
            past = np.where(runs > self.offsets[documents], ends[runs - 1] - places, 0)
            return (cumulated[runs] - np.maximum(past, 0)).astype(np.int64)

        return members_before(stops) - members_before(starts)

    def mask(self, document: int, length: int) -> NDArray[np.bool_]:
        """[length], true on the members of the runs of ``document``."""
        mask = np.zeros(length, np.bool_)
        low, high = self.offsets[document : document + 2]
        for start, stop in self.bounds[low:high].tolist():
            mask[start:stop] = True
        return mask

    def train_on(self, train_on: TrainOn, lengths: NDArray[np.int64]) -> Runs:
        """:func:`apply_train_on` for all documents, ``lengths`` [D] in tokens."""
        documents = np.arange(len(lengths) + 1)
        if train_on is TrainOn.all:
            return Runs(documents, np.stack([np.zeros_like(lengths), lengths], axis=1))
        if train_on is TrainOn.assistant:
            return self
        filled = np.diff(self.offsets) > 0
        last = self.bounds[self.offsets[1:][filled] - 1]
        return Runs(np.concatenate([[0], np.cumsum(filled)]), last)

    def gated_rows(self) -> Runs:
        """The rows that these runs of tokens gate."""
        return Runs(self.offsets, np.maximum(self.bounds - 1, 0))
