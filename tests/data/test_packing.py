"""Segments and packs: every row once, nothing over the budget."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.data.masks import Runs, supervised_runs
from eagle3.data.packing import (
    PackingRule,
    Segmentation,
    best_fit_decreasing,
    pack_epoch,
    segment_documents,
    split_rows,
)
from eagle3.data.segments import Pack, Packs, Segment
from eagle3.errors import ConfigError
from eagle3.names import LongDocuments

Masks = list[list[bool]]


def all_gated(lengths: np.ndarray) -> Runs:
    """Every row of every document is supervised."""
    rows = np.stack([np.zeros_like(lengths), lengths - 1], axis=1)
    return Runs(np.arange(len(lengths) + 1), rows)


def segmented(lengths: list[int], rule: PackingRule) -> Segmentation:
    tokens = np.array(lengths, np.int64)
    return segment_documents(range(len(tokens)), tokens, all_gated(tokens), rule)


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


def cut_one_by_one(masks: Masks, rule: PackingRule) -> tuple[list[Pack], int]:
    """What the arrays must say, document by document; and the gated rows in which chains start."""
    kept, supervised = [], 0
    for document, mask in enumerate(masks):
        gates, rows = mask[1:], len(mask) - 1
        match rule.long_documents:
            case LongDocuments.drop if rows > rule.max_seq_len:
                continue
            case LongDocuments.truncate:
                rows = min(rows, rule.max_seq_len)
        segments = split_rows(document, rows, rule)
        segments = tuple(s for s in segments if any(gates[s.own_start : s.stop]))
        supervised += sum(sum(gates[s.own_start : s.own_stop]) for s in segments)
        kept += [segments] if segments else []
    return kept, supervised


@settings(deadline=None, max_examples=60)
@given(
    masks=st.lists(st.lists(st.booleans(), min_size=2, max_size=70), min_size=1, max_size=8),
    rule=rules(),
    long_documents=st.sampled_from(LongDocuments),
)
def test_all_documents_at_once_are_cut_as_one_by_one(
    masks: Masks, rule: PackingRule, long_documents: LongDocuments
) -> None:
    rule = PackingRule(rule.max_seq_len, long_documents, rule.split_context_tokens, rule.steps)
    lengths = np.array([len(mask) for mask in masks])
    gates = Runs.stack(supervised_runs(np.array(mask)) for mask in masks).gated_rows()
    found = segment_documents(range(len(masks)), lengths, gates, rule)
    kept, supervised = cut_one_by_one(masks, rule)
    assert list(found.segments) == kept
    assert found.supervised_rows == int(found.segments.supervised.sum()) == supervised
    assert found.overhead_rows == sum(
        s.rows - (s.own_stop - s.own_start) for segments in kept for s in segments
    )


def test_a_document_that_comes_twice_has_its_segments_twice() -> None:
    rule = PackingRule(6, LongDocuments.split, split_context_tokens=2, steps=3)
    lengths = np.array([4, 11, 5])
    found = segment_documents(np.array([1, 1, 2]), lengths, all_gated(lengths), rule)
    assert list(found.segments) == [split_rows(1, 10, rule)] * 2 + [(Segment(2, 0, 4, 0, 4),)]
    assert found.supervised_rows == 10 + 10 + 4
    assert found.segments.documents.tolist() == [1, 2]


def test_no_document_is_no_segment() -> None:
    rule = PackingRule(6, LongDocuments.split, 2, 3)
    found = segment_documents([], np.zeros(0, np.int64), Runs.stack([]), rule)
    assert not found.segments
    assert len(pack_epoch(found.segments, 6, seed=0, epoch=0)) == 0


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
    documents = segmented(lengths, rule).segments
    packs = pack_epoch(documents, rule.max_seq_len, seed, epoch)
    packed = [segment for pack in packs for segment in pack]
    assert len(packed) == len(set(packed))
    assert set(packed) == {segment for segments in documents for segment in segments}
    assert all(0 < sum(s.rows for s in pack) <= rule.max_seq_len for pack in packs)
    assert packs.rows.tolist() == [sum(s.rows for s in pack) for pack in packs]
    assert packs == pack_epoch(documents, rule.max_seq_len, seed, epoch)


def test_order_depends_on_seed_and_epoch_only() -> None:
    documents = segmented([5] * 30, PackingRule(8, LongDocuments.split, 0, 1)).segments
    np.random.seed(1)
    first = pack_epoch(documents, 8, seed=0, epoch=0)
    np.random.seed(2)
    assert first == pack_epoch(documents, 8, seed=0, epoch=0)
    assert first != pack_epoch(documents, 8, seed=0, epoch=1)
    assert first != pack_epoch(documents, 8, seed=1, epoch=0)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param([60, 4, 30, 28], [0, 0, 1, 1], id="fullest that has room"),
        pytest.param([60, 4, 30, 30], [0, 1, 1, 1], id="four documents in two packs"),
        pytest.param([10, 64, 64], [2, 0, 1], id="full ones stand alone"),
        pytest.param([33, 33], [0, 1], id="no room"),
        pytest.param([], [], id="none"),
    ],
)
def test_best_fit_decreasing(rows: list[int], expected: list[int]) -> None:
    assert best_fit_decreasing(np.array(rows, np.int64), capacity=64).tolist() == expected


@given(rows=st.lists(st.integers(1, 40), max_size=60))
def test_best_fit_keeps_the_budget_and_opens_a_pack_only_in_need(rows: list[int]) -> None:
    numbers = best_fit_decreasing(np.array(rows, np.int64), capacity=40)
    loads = np.bincount(numbers, weights=rows)
    assert np.all(loads <= 40)
    assert len(loads) < 2 or np.sort(loads)[:2].sum() > 40


@pytest.mark.parametrize(
    ("documents", "fill"),
    [pytest.param(3000, 0.997, id="one window"), pytest.param(37312, 0.998, id="five windows")],
)
def test_real_lengths_leave_almost_no_padding(documents: int, fill: float) -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(7.44, 0.8, documents), 16, 8192).astype(np.int64)
    rule = PackingRule(4096, LongDocuments.split, 128, 3)
    found = segment_documents(range(documents), lengths, all_gated(lengths), rule)
    packs = pack_epoch(found.segments, 4096, seed=0, epoch=0)
    assert packs.rows.sum() > fill * len(packs) * 4096
    assert found.overhead_rows < 0.02 * packs.rows.sum()


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
    """Rows 5, 9 and 9 against 6; the third document is gated in row 7 only, the last nowhere."""
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
    assert list(found.segments) == [(Segment(0, 0, 6, 0, 6),)]
    assert found.supervised_rows == 4


def test_no_room_to_split_names_the_settings() -> None:
    rule = PackingRule(6, LongDocuments.split, split_context_tokens=4, steps=3)
    with pytest.raises(ConfigError, match=r"data\.split_context_tokens=4 .* 6 rows"):
        split_rows(0, 7, rule)
    assert len(segmented([7, 4], rule).segments) == 2, "nothing has to be split"


def test_packs_are_equal_by_content_not_by_table() -> None:
    rule = PackingRule(6, LongDocuments.split, 2, 3)
    documents = segmented([5, 11, 4], rule).segments
    reverse = np.arange(len(documents.table))[::-1]
    turned = Packs(documents.table.take(reverse), reverse[documents.order], documents.offsets)
    assert turned == documents
    assert documents.select(np.array([2, 0, 0])) == documents.select(np.array([2, 0, 0]))
    assert list(documents.select(np.array([2, 0, 0]))) == [documents[2], documents[0], documents[0]]
    assert documents.select(np.array([0, 2])) != documents.select(np.array([2, 0]))
    with pytest.raises(IndexError, match="found 3 packs"):
        documents[3]
