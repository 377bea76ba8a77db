"""Who does which pack in which optimizer step, and what the packing achieves.

Every rank computes the whole plan and takes its part, so nothing has to be communicated, and an
optimizer step trains the same packs however many ranks share them::

    shuffled packs     7 2 9 4 3 8 6 5 | 1    a pack is drawn as its number of supervised rows
    within a window    2 3 4 5 | 6 7 8 9      sorted, and cut into steps of world_size * accumulate
    steps shuffled     6 7 8 9 | 2 3 4 5 | 1  the rest is the last step, and partial
    dealt: rank 0      8 7     | 4 3     | 1  the larger share to the rank that has less so far,
           rank 1      9 6     | 5 2     |    the last step counted first

The rank with most supervised rows sets the pace of a step, so packs that are alike share a step.
"""

from __future__ import annotations

import hashlib
import heapq
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from eagle3.data.packing import Segmentation, best_fit_decreasing, pack_epoch
from eagle3.data.segments import Pack, Packs, offsets_of

_WINDOW_STEPS = 32
"""Steps among which packs are sorted: enough to make those of a step alike, few enough to leave
the order of the epoch random."""
_GROUPING = 1
"""Separates the random numbers of this module from those of the packing."""


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """Packs dealt to ranks; each optimizer step takes ``world_size * accumulate`` of them."""

    packs: Packs
    """In the order of the steps; the order does not depend on the number of ranks."""
    places: NDArray[np.int64]
    """[steps, accumulate, world_size]: number of the pack, ``len(packs)`` or more for none."""

    @property
    def steps(self) -> int:
        """Optimizer steps, the last one perhaps partial."""
        return self.places.shape[0]

    @property
    def accumulate(self) -> int:
        """Packs of a rank in an optimizer step."""
        return self.places.shape[1]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.places.shape[2]

    def rank_window(self, step: int, rank: int) -> tuple[Pack, ...]:
        """The ``accumulate`` packs of ``rank`` in ``step``; empty ones where packs run out."""
        places = self.places[step, :, rank].tolist()
        return tuple(self.packs[place] if place < len(self.packs) else () for place in places)

    def place(self, step: int, rank: int, slot: int) -> int:
        """Number in the epoch of the pack that ``rank`` trains in accumulation ``slot``."""
        return int(self.places[step, slot, rank])

    @cached_property
    def fingerprint(self) -> str:
        """Hash of every segment's place: equal for equal plans, on every rank and machine."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.places, *self.packs.arrays()):
            digest.update(repr(array.shape).encode())
            digest.update(array.astype("<i8").tobytes())
        return digest.hexdigest()

    def rank_sums(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sums of ``values`` [N], one a pack, over the packs of a step and rank: [steps, ranks]."""
        padded = np.append(values, 0)
        summed: NDArray[np.int64] = padded[np.minimum(self.places, len(values))].sum(axis=1)
        return summed


def training_plan(
    documents: Packs, max_seq_len: int, seed: int, epoch: int, world_size: int, accumulate: int
) -> EpochPlan:
    """Pack the segments of ``documents`` and deal the packs, from ``(seed, epoch)`` alone.

    The packs of a step depend on ``world_size * accumulate``, not on the two. A partial last step
    is shared as evenly as possible, ranks before slots.
    """
    per_step = world_size * accumulate
    shuffled = pack_epoch(documents, max_seq_len, seed, epoch)
    rng = np.random.default_rng([seed, epoch, _GROUPING])
    packs = shuffled.select(_alike_together(shuffled.supervised, per_step, rng))
    return EpochPlan(packs, deal(packs.supervised, world_size, accumulate))


def deal(supervised: NDArray[np.int64], world_size: int, accumulate: int) -> NDArray[np.int64]:
    """Places [steps, accumulate, world_size] of consecutive packs, ``supervised`` [N] rows each.

    In every step, packs are made into as many shares as ranks, large packs first, each slot's
    largest to the smallest share; then the largest share goes to the rank that has least so far.
    """
    steps = -(-len(supervised) // (world_size * accumulate))
    sizes = np.zeros((steps, accumulate * world_size), np.int64)
    sizes.ravel()[: len(supervised)] = supervised
    # Empty packs have the highest numbers, so they are the last ones among packs of no row.
    largest_first = np.argsort(-sizes, axis=1, kind="stable")
    layers = largest_first.reshape(steps, accumulate, world_size)
    loads = np.zeros((steps, world_size), np.int64)
    shares = np.empty_like(layers)
    for slot in range(accumulate):
        smallest_first = np.argsort(loads, axis=1, kind="stable")
        np.put_along_axis(shares[:, slot], smallest_first, layers[:, slot], axis=1)
        loads += np.take_along_axis(sizes, shares[:, slot], axis=1)
    ranks = _level(loads)
    dealt = np.take_along_axis(shares, ranks[:, None, :], axis=2)
    return dealt + np.arange(steps)[:, None, None] * (accumulate * world_size)


def validation_plan(documents: Packs, max_seq_len: int, world_size: int) -> EpochPlan:
    """Deal whole documents over ranks, one pack a step, as many steps on every rank.

    The order is fixed, and the segments of a document come in order on one rank: all but the last
    fill a pack alone, and full packs are laid first.
    """
    dealt: list[list[int]] = [[] for _ in range(world_size)]
    loads = [(0, rank) for rank in range(world_size)]
    sizes = documents.rows
    for document in np.argsort(-sizes, kind="stable").tolist():
        rows, rank = heapq.heappop(loads)
        dealt[rank].append(document)
        heapq.heappush(loads, (rows + int(sizes[document]), rank))
    order, numbers = [], []
    for rank in range(world_size):
        segments = documents.select(np.array(dealt[rank], np.int64)).order
        rank_packs = best_fit_decreasing(documents.table.rows[segments], max_seq_len)
        order.append(segments)
        numbers.append(rank_packs * world_size + rank)
    number = np.concatenate(numbers)
    steps = int(number.max(initial=-1)) // world_size + 1
    by_pack = np.argsort(number, kind="stable")
    offsets = offsets_of(np.bincount(number, minlength=steps * world_size))
    packs = Packs(documents.table, np.concatenate(order)[by_pack], offsets)
    return EpochPlan(packs, np.arange(steps * world_size).reshape(steps, 1, world_size))


@dataclass(frozen=True)
class PackingReport:
    """What the packing of an epoch achieves and costs."""

    documents: int
    """Documents that are trained."""
    packs: int
    steps: int
    """Optimizer steps."""
    max_seq_len: int
    fill: float
    """Rows laid over rows of all packs."""
    supervised_fraction: float
    """Gated rows in which a chain starts over rows laid."""
    overhead_rows: int
    """Context and look-ahead rows of split documents, laid a second time."""
    overhead_fraction: float
    """The same over rows laid."""
    lost_tokens: int
    """Rows of long documents that are not trained."""
    clipped_share: float
    """Supervised rows whose segment does not reach back to row 0, over all supervised rows."""
    long_documents: int
    """Documents of more than ``max_seq_len`` rows."""
    dropped_documents: int
    """Long documents of which nothing is trained."""
    unsupervised_documents: int
    """Documents left out because no row is gated."""
    short_documents: int
    """Documents left out because they have less than two tokens."""
    world_size: int
    """Ranks that share the epoch."""
    balance_rows: float
    """Rows that the busiest rank lays in the epoch over the mean of the ranks."""
    balance_supervised: float
    """The same for gated rows in which a chain starts."""
    step_skew: float
    """The same for a single optimizer step, averaged over the steps: ranks wait for each other."""

    def lines(self) -> list[str]:
        """For people."""
        lines = [
            f"{self.documents:,} documents in {self.packs:,} packs of {self.max_seq_len:,} rows, "
            f"{self.steps:,} optimizer steps an epoch",
            f"fill {self.fill:.1%}, supervised rows {self.supervised_fraction:.1%}",
            f"{self.long_documents:,} documents are longer than a pack: tokens lost "
            f"{self.lost_tokens:,}, overhead {self.overhead_rows:,} context and look-ahead rows "
            f"({self.overhead_fraction:.1%}), {self.clipped_share:.1%} of the supervised rows see "
            "clipped context",
            f"left out: {self.dropped_documents:,} long, {self.unsupervised_documents:,} without a "
            f"supervised row, {self.short_documents:,} of less than two tokens",
        ]
        if self.world_size > 1:
            lines.append(
                f"the busiest of {self.world_size} ranks does {self.balance_rows:.3f} times the "
                f"mean rows of an epoch, {self.balance_supervised:.3f} times the mean supervised "
                f"rows, and {self.step_skew:.3f} times the mean supervised rows of a step"
            )
        return lines


def packing_report(
    segmentation: Segmentation, plan: EpochPlan, max_seq_len: int, short_documents: int
) -> PackingReport:
    """Sum up ``plan``, which packs ``segmentation``."""
    rows, supervised = plan.packs.rows, plan.packs.supervised
    packs, laid = int(np.count_nonzero(rows)), int(rows.sum())
    rank_rows, rank_supervised = plan.rank_sums(rows), plan.rank_sums(supervised)
    return PackingReport(
        documents=len(segmentation.segments),
        packs=packs,
        steps=plan.steps,
        max_seq_len=max_seq_len,
        fill=laid / max(packs * max_seq_len, 1),
        supervised_fraction=segmentation.supervised_rows / max(laid, 1),
        overhead_rows=segmentation.overhead_rows,
        overhead_fraction=segmentation.overhead_rows / max(laid, 1),
        lost_tokens=segmentation.lost_rows,
        clipped_share=segmentation.clipped_rows / max(segmentation.supervised_rows, 1),
        long_documents=segmentation.long_documents,
        dropped_documents=segmentation.dropped_documents,
        unsupervised_documents=segmentation.unsupervised_documents,
        short_documents=short_documents,
        world_size=plan.world_size,
        balance_rows=_max_over_mean(rank_rows.sum(axis=0)),
        balance_supervised=_max_over_mean(rank_supervised.sum(axis=0)),
        step_skew=_max_over_mean(rank_supervised),
    )


def _max_over_mean(shares: NDArray[np.int64]) -> float:
    """Largest over mean of the last axis, averaged; 1 where there is nothing to share."""
    largest, mean = shares.max(axis=-1), shares.mean(axis=-1)
    if not np.any(mean > 0):
        return 1.0
    return float((largest[mean > 0] / mean[mean > 0]).mean())


def _alike_together(
    supervised: NDArray[np.int64], per_step: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """An order of the packs in which those of a step have similar ``supervised`` rows, [N]."""
    steps = len(supervised) // per_step
    whole = steps * per_step
    windows = -(-steps // _WINDOW_STEPS)
    window = np.arange(whole) // per_step * windows // max(steps, 1)
    by_size = np.lexsort((supervised[:whole], window)).reshape(steps, per_step)
    rest = np.arange(whole, len(supervised))
    return np.concatenate([by_size[rng.permutation(steps)].ravel(), rest])


def _level(loads: NDArray[np.int64]) -> NDArray[np.int64]:
    """Which of the shares ``loads`` [steps, ranks] each rank takes, so that sums stay level.

    The last step comes first: it may be partial, and the others make up for it.
    """
    steps, world_size = loads.shape
    largest_first = np.argsort(-loads, axis=1, kind="stable")
    ranked = np.take_along_axis(loads, largest_first, axis=1).tolist()
    totals = [0] * world_size
    takers = np.empty_like(loads)
    for step in (*range(steps)[-1:], *range(steps - 1)):
        least_first = sorted(range(world_size), key=totals.__getitem__)
        takers[step] = least_first
        for rank, load in zip(least_first, ranked[step], strict=True):
            totals[rank] += load
    taken = np.empty_like(loads)
    np.put_along_axis(taken, takers, largest_first, axis=1)
    return taken
