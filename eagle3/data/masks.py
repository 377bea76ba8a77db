"""Which tokens are supervised, as runs: compact enough to keep for every document of a directory.

A run ``[a, b)`` of supervised tokens gates the rows ``[a - 1, b - 1)``, because row i is gated by
token i + 1 (see :mod:`eagle3.data.batch`); a supervised token 0 gates nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool
from numpy.typing import NDArray
from torch import Tensor

from eagle3.names import TrainOn


def supervised_runs(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Bounds [R, 2] of the runs of ones in ``mask`` [n]."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return edges.reshape(-1, 2).astype(np.int64)


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

    def count(self, document: int, start: int, stop: int) -> int:
        """Members of the runs of ``document`` within ``[start, stop)``."""
        low, high = self.offsets[document : document + 2]
        # Python integers: most documents have one to three runs, too few for numpy to pay off.
        runs = self.bounds[low:high].tolist()
        return sum(max(min(b, stop) - max(a, start), 0) for a, b in runs)

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
