"""Which documents of several directories an epoch trains, by weight.

A directory of weight 0.5 and six documents, in a fixed shuffled order that goes on for ever::

    documents   4 1 5 0 2 3 4 1 5 0 2 3 ...
    epoch       0 0 0 1 1 1 2 2 2 ...

so every document comes equally often, whatever the weight: over any number of epochs two documents
of a directory differ by at most one.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

_MAX_DENOMINATOR = 1_000_000
_MIXING = 2
"""Separates the random numbers of this module from those of the packing and the plan."""


def epoch_documents(
    part_of: NDArray[np.integer], weights: Sequence[float], seed: int, epoch: int
) -> NDArray[np.int64]:
    """The documents of an epoch, ascending, from ``(seed, epoch)`` alone.

    Args:
        part_of: [D], directory of each document, an index into ``weights``.
        weights: times a document of each directory comes in an epoch, above 0: 1 is each exactly
            once, 2 twice, 0.5 half of them, and the other half in the next epoch.
        seed: shuffles each directory once for all epochs.
        epoch: counted from 0.

    Returns:
        Positions in ``part_of``, a document as often as it is trained. All weights 1 give each
        document once.
    """
    assert all(weight > 0 for weight in weights), "weights are positive"
    chosen = [
        _turn(np.flatnonzero(part_of == part), weight, [seed, part, _MIXING], epoch)
        for part, weight in enumerate(weights)
    ]
    return np.sort(np.concatenate([np.zeros(0, np.int64), *chosen]))


def _turn(
    documents: NDArray[np.int64], weight: float, seed: list[int], epoch: int
) -> NDArray[np.int64]:
    """The part of the endless order that belongs to ``epoch``."""
    # Exact, so that epochs meet without a gap, and 0.1 is a tenth.
    per_epoch = Fraction(weight).limit_denominator(_MAX_DENOMINATOR) * len(documents)
    start, stop = int(epoch * per_epoch), int((epoch + 1) * per_epoch)
    if not len(documents):
        return documents
    shuffled = np.random.default_rng(seed).permutation(documents)
    return shuffled[np.arange(start, stop) % len(documents)]
