"""Who does which pack in which optimizer step, and what the packing achieves.

Every rank computes the whole plan and takes its part, so nothing has to be communicated, and an
optimizer step trains the same packs however many ranks share them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from eagle3.data.packing import Pack, Segment, Segmentation, best_fit_decreasing


@dataclass(frozen=True)
class EpochPlan:
    """Packs dealt to ranks; each optimizer step takes ``world_size * accumulate`` of them."""

    packs: tuple[Pack, ...]
    world_size: int
    accumulate: int

    @property
    def steps(self) -> int:
        """Optimizer steps, the last one perhaps partial."""
        return -(-len(self.packs) // (self.world_size * self.accumulate))

    def rank_window(self, step: int, rank: int) -> tuple[Pack, ...]:
        """The ``accumulate`` packs of ``rank`` in ``step``; empty ones where packs run out."""
        places = (self.place(step, rank, slot) for slot in range(self.accumulate))
        return tuple(self.packs[i] if i < len(self.packs) else () for i in places)

    def place(self, step: int, rank: int, slot: int) -> int:
        """Place in the epoch of the pack that ``rank`` trains in accumulation ``slot``.

        Ranks are dealt before slots, so that a partial step is shared as evenly as possible.
        """
        return (step * self.accumulate + slot) * self.world_size + rank


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

    def lines(self) -> list[str]:
        """For people."""
        return [
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


def packing_report(
    segmentation: Segmentation, plan: EpochPlan, max_seq_len: int, short_documents: int
) -> PackingReport:
    """Sum up ``plan``, which packs ``segmentation``."""
    packs = sum(1 for pack in plan.packs if pack)
    laid = sum(segment.rows for pack in plan.packs for segment in pack)
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
    )


def validation_plan(documents: Sequence[Pack], max_seq_len: int, world_size: int) -> EpochPlan:
    """Deal whole documents over ranks, one pack a step, as many steps on every rank.

    The order is fixed, and the segments of a document come in order on one rank: all but the last
    fill a pack alone, and full packs are laid first.
    """
    dealt: list[list[Segment]] = [[] for _ in range(world_size)]
    loads = [(0, rank) for rank in range(world_size)]
    for segments in sorted(documents, key=lambda d: sum(s.rows for s in d), reverse=True):
        rows, rank = heapq.heappop(loads)
        dealt[rank].extend(segments)
        heapq.heappush(loads, (rows + sum(s.rows for s in segments), rank))
    packs = [best_fit_decreasing(segments, max_seq_len) for segments in dealt]
    steps = max(len(rank_packs) for rank_packs in packs)
    interleaved = tuple(
        rank_packs[step] if step < len(rank_packs) else ()
        for step in range(steps)
        for rank_packs in packs
    )
    return EpochPlan(interleaved, world_size, accumulate=1)
