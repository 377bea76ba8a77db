"""Segments and packs: every row once, nothing over the budget."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.data.masks import Runs
from eagle3.data.packing import (
    PackingRule,
    Segment,
    best_fit_decreasing,
    pack_epoch,
    segment_documents,
    split_rows,
)
from eagle3.errors import ConfigError
from eagle3.names import LongDocuments


def all_gated(lengths: np.ndarray) -> Runs:
    """Every row of every document is supervised."""
    rows = np.stack([np.zeros_like(lengths), lengths - 1], axis=1)
    return Runs(np.arange(len(lengths) + 1), rows)


@st.composite
def rules(draw: st.DrawFn) -> PackingRule:
    steps = draw(st.integers(1, 5))
    context = draw(st.integers(0, 6))
    rows = draw(st.integers(context + steps, 30))
    return PackingRule(rows, LongDocuments.split, context, steps)


def test_split_as_drawn() -> None:
    rule = PackingRule(6, LongDocuments.split, split_context_tokens=2, steps=3)
    assert split_rows(7, 10, rule) == (
        Segment(7, 0, 6, 0, 4),
        Segment(7, 2, 8, 4, 6),
        Segment(7, 4, 10, 6, 10),
    )


@given(rule=rules(), rows=st.integers(1, 200))
def test_every_row_and_step_is_trained_exactly_once(rule: PackingRule, rows: int) -> None:
    segments = split_rows(0, rows, rule)
    trained = [
        (row, step)
        for segment in segments
        for row in range(segment.own_start, segment.own_stop)
        for step in range(rule.steps)
        if row + step < segment.stop
    ]
    assert sorted(trained) == [
        (row, step) for row in range(rows) for step in range(rule.steps) if row + step < rows
    ]


@given(rule=rules(), rows=st.integers(1, 200))
def test_segments_stay_within_the_budget_and_keep_their_context(
    rule: PackingRule, rows: int
) -> None:
    segments = split_rows(0, rows, rule)
    for segment in segments:
        assert 0 <= segment.start <= segment.own_start < segment.own_stop <= segment.stop <= rows
        assert segment.rows <= rule.max_seq_len
        assert segment.own_start - segment.start == min(
            rule.split_context_tokens, segment.own_start
        )
    for segment in segments[:-1]:
        assert segment.rows == rule.max_seq_len


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(2, 60), min_size=1, max_size=40),
    rule=rules(),
    seed=st.integers(0, 3),
    epoch=st.integers(0, 3),
)
def test_an_epoch_packs_every_segment_once_within_the_budget(
    lengths: list[int], rule: PackingRule, seed: int, epoch: int
) -> None:
    tokens = np.array(lengths)
    segmentation = segment_documents(range(len(tokens)), tokens, all_gated(tokens), rule)
    packs = pack_epoch(segmentation.segments, rule.max_seq_len, seed, epoch)
    packed = [segment for pack in packs for segment in pack]
    assert len(packed) == len(set(packed))
    assert set(packed) == {segment for segments in segmentation.segments for segment in segments}
    assert all(0 < sum(s.rows for s in pack) <= rule.max_seq_len for pack in packs)
    assert packs == pack_epoch(segmentation.segments, rule.max_seq_len, seed, epoch)


def test_order_depends_on_seed_and_epoch_only() -> None:
    lengths = np.full(30, 5)
    rule = PackingRule(8, LongDocuments.split, 0, 1)
    documents = segment_documents(range(30), lengths, all_gated(lengths), rule).segments
    first = pack_epoch(documents, 8, seed=0, epoch=0)
    assert first != pack_epoch(documents, 8, seed=0, epoch=1)
    assert first != pack_epoch(documents, 8, seed=1, epoch=0)


def test_best_fit_takes_the_fullest_pack_that_has_room() -> None:
    rows = [60, 4, 30, 28]
    segments = [Segment(d, 0, n, 0, n) for d, n in enumerate(rows)]
    packs = best_fit_decreasing(segments, capacity=64)
    assert [[s.document for s in pack] for pack in packs] == [[0, 1], [2, 3]]


def test_real_lengths_leave_almost_no_padding() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(7.4, 0.8, 3000), 16, 8192).astype(np.int64)
    rule = PackingRule(4096, LongDocuments.split, 128, 3)
    segmentation = segment_documents(range(3000), lengths, all_gated(lengths), rule)
    packs = pack_epoch(segmentation.segments, 4096, seed=0, epoch=0)
    laid = sum(s.rows for pack in packs for s in pack)
    assert laid > 0.99 * len(packs) * 4096


@pytest.mark.parametrize(
    ("long_documents", "kept", "lost", "dropped"),
    [
        pytest.param(LongDocuments.split, [0, 1, 1, 1, 2, 2], 0, 0, id="split"),
        pytest.param(LongDocuments.truncate, [0, 1], 3 + 9, 1, id="truncate"),
        pytest.param(LongDocuments.drop, [0], 9 + 9, 2, id="drop"),
    ],
)
def test_long_documents(
    long_documents: LongDocuments, kept: list[int], lost: int, dropped: int
) -> None:
    """Rows 5, 9 and 9 against 6; the last document is gated in row 7 only."""
    gates = Runs(np.array([0, 1, 2, 3, 4]), np.array([[0, 5], [2, 9], [7, 8], [0, 0]]))
    lengths = np.array([6, 10, 10, 4])
    rule = PackingRule(6, long_documents, split_context_tokens=2, steps=3)
    found = segment_documents(range(4), lengths, gates, rule)
    assert [s.document for segments in found.segments for s in segments] == kept
    assert found.lost_rows == lost
    assert found.dropped_documents == dropped
    assert found.long_documents == 2
    assert found.unsupervised_documents == 1


def test_cost_of_splitting_is_counted() -> None:
    """Nine rows as 0-6, 2-8, 4-9: own 4, 2 and 3 rows; gated are rows 2 to 8."""
    gates = Runs(np.array([0, 1]), np.array([[2, 9]]))
    rule = PackingRule(6, LongDocuments.split, split_context_tokens=2, steps=3)
    found = segment_documents([0], np.array([10]), gates, rule)
    assert found.overhead_rows == 6 + 6 + 5 - 9
    assert found.supervised_rows == 7
    assert found.clipped_rows == 5


def test_truncation_keeps_the_first_rows() -> None:
    gates = Runs(np.array([0, 1]), np.array([[2, 9]]))
    rule = PackingRule(6, LongDocuments.truncate, split_context_tokens=2, steps=3)
    found = segment_documents([0], np.array([10]), gates, rule)
    assert found.segments == ((Segment(0, 0, 6, 0, 6),),)
    assert found.supervised_rows == 4


def test_no_room_to_split_names_the_settings() -> None:
    rule = PackingRule(6, LongDocuments.split, split_context_tokens=4, steps=3)
    with pytest.raises(ConfigError, match=r"data\.split_context_tokens=4 .* 6 rows"):
        split_rows(0, 7, rule)
