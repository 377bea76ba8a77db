"""Packs dealt to ranks and steps, the validation plan, and the report."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.data.masks import Runs
from eagle3.data.packing import (
    PackingRule,
    Segment,
    Segmentation,
    pack_epoch,
    segment_documents,
)
from eagle3.data.plan import EpochPlan, packing_report, validation_plan
from eagle3.names import LongDocuments


def single(document: int, rows: int = 3) -> Segment:
    return Segment(document, 0, rows, 0, rows)


def segmented(lengths: np.ndarray, rule: PackingRule) -> Segmentation:
    """All rows gated."""
    rows = np.stack([np.zeros_like(lengths), lengths - 1], axis=1)
    gates = Runs(np.arange(len(lengths) + 1), rows)
    return segment_documents(range(len(lengths)), lengths, gates, rule)


@given(
    packs=st.integers(0, 40),
    world_size=st.integers(1, 5),
    accumulate=st.integers(1, 4),
)
def test_ranks_are_disjoint_and_complete(packs: int, world_size: int, accumulate: int) -> None:
    plan = EpochPlan(tuple((single(i),) for i in range(packs)), world_size, accumulate)
    per_step = world_size * accumulate
    assert plan.steps == (packs + per_step - 1) // per_step
    seen = []
    for step in range(plan.steps):
        in_step = []
        for rank in range(world_size):
            window = plan.rank_window(step, rank)
            assert len(window) == accumulate
            in_step += [pack[0].document for pack in window if pack]
        assert sorted(in_step) == list(range(step * per_step, min((step + 1) * per_step, packs)))
        seen += in_step
    assert sorted(seen) == list(range(packs))


def test_partial_step_is_spread_over_ranks() -> None:
    plan = EpochPlan(tuple((single(i),) for i in range(5)), world_size=2, accumulate=2)
    assert plan.rank_window(1, 0) == ((single(4),), ())
    assert plan.rank_window(1, 1) == ((), ())
    assert [plan.place(1, rank, 0) for rank in range(2)] == [4, 5]


def test_place_in_the_epoch_does_not_depend_on_the_ranks() -> None:
    packs = tuple((single(i),) for i in range(12))
    for world_size, accumulate in ((1, 4), (2, 2), (4, 1)):
        plan = EpochPlan(packs, world_size, accumulate)
        for step in range(plan.steps):
            for rank in range(world_size):
                for slot, pack in enumerate(plan.rank_window(step, rank)):
                    assert plan.place(step, rank, slot) == pack[0].document


def test_heavy_tail_is_shared_evenly() -> None:
    rng = np.random.default_rng(3)
    lengths = np.clip(rng.lognormal(6, 1.2, 4000), 8, 8192).astype(np.int64)
    rule = PackingRule(2048, LongDocuments.split, 64, 3)
    plan = EpochPlan(pack_epoch(segmented(lengths, rule).segments, 2048, 0, 0), 4, 1)
    rows, documents = [0] * 4, [0] * 4
    for step in range(plan.steps):
        for rank in range(4):
            for pack in plan.rank_window(step, rank):
                rows[rank] += sum(s.rows for s in pack)
                documents[rank] += len(pack)
    assert max(rows) < 1.05 * min(rows)
    assert max(documents) < 1.3 * min(documents)


@given(
    lengths=st.lists(st.integers(2, 60), max_size=25),
    world_size=st.integers(1, 4),
)
def test_validation_deals_whole_documents_in_order(lengths: list[int], world_size: int) -> None:
    rule = PackingRule(16, LongDocuments.split, 3, 3)
    segments = segmented(np.array(lengths, dtype=np.int64), rule).segments
    plan = validation_plan(segments, 16, world_size)
    rank_of: dict[int, int] = {}
    seen: dict[int, list[Segment]] = {}
    for step in range(plan.steps):
        for rank in range(world_size):
            (pack,) = plan.rank_window(step, rank)
            assert sum(s.rows for s in pack) <= 16
            for segment in pack:
                assert rank_of.setdefault(segment.document, rank) == rank
                seen.setdefault(segment.document, []).append(segment)
    assert {tuple(found) for found in seen.values()} == set(segments)


def test_validation_of_few_documents_has_equal_steps() -> None:
    plan = validation_plan([(single(0),)], 16, world_size=3)
    assert plan.steps == 1
    assert [plan.rank_window(0, rank) for rank in range(3)] == [((single(0),),), ((),), ((),)]


def test_report_by_hand() -> None:
    """Documents of 5 and 10 tokens, packs of 6 rows; the long one is split as 6 + 6 + 5 rows."""
    rule = PackingRule(6, LongDocuments.split, split_context_tokens=2, steps=3)
    segmentation = segmented(np.array([5, 10]), rule)
    plan = EpochPlan(pack_epoch(segmentation.segments, 6, 0, 0), world_size=2, accumulate=1)
    report = packing_report(segmentation, plan, 6, short_documents=1)
    assert (report.documents, report.packs, report.steps) == (2, 4, 2)
    assert report.fill == pytest.approx((4 + 17) / 24)
    assert report.supervised_fraction == pytest.approx(13 / 21)
    assert report.overhead_rows == 8
    assert report.clipped_share == pytest.approx(5 / 13)
    assert (report.lost_tokens, report.dropped_documents, report.short_documents) == (0, 0, 1)
    text = "\n".join(report.lines())
    assert "2 documents in 4 packs of 6 rows, 2 optimizer steps" in text
    assert "fill 87.5%" in text
    assert "1 of less than two tokens" in text
