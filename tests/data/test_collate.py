"""The shift, with the numbers of the drawing in :mod:`eagle3.data.batch`."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3.data.buffers import BufferPool
from eagle3.data.collate import DocumentRows, StatePlanes, gated_ranges, lay_rows
from eagle3.data.layout import StateLayout
from eagle3.data.packing import PackingRule, Segment, split_rows
from eagle3.data.sample import Sample
from eagle3.names import LongDocuments
from tests.data.laying import lay

AUX, HIDDEN = 2, 3


def numbered(tokens: int, base: int = 0) -> Sample:
    """Token j has id base + j; its aux states are base + j (+ 0.25), its last state -(base + j)."""
    index = torch.arange(base, base + tokens)
    state = index[:, None].repeat(1, HIDDEN).double()
    return Sample(
        input_ids=index,
        loss_mask=(index - base) % 2 == 0,
        aux_hidden=torch.cat((state, state + 0.25), dim=1),
        last_hidden=-state,
    )


def all_gated(sample: Sample) -> Sample:
    return replace(sample, loss_mask=torch.ones_like(sample.loss_mask))


def whole(document: int, tokens: int) -> Segment:
    return Segment(document, 0, tokens - 1, 0, tokens - 1)


def test_drawing() -> None:
    batch = lay([whole(0, 5)], [numbered(5)], max_seq_len=6)
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 0, 0]
    assert batch.next_ids.tolist() == [2, 3, 4, -1, -1, -1]
    assert batch.aux_hidden[:, 0].tolist() == [0, 1, 2, 3, 0, 0]
    assert batch.aux_hidden[:, HIDDEN].tolist() == [0.25, 1.25, 2.25, 3.25, 0, 0]
    assert batch.last_hidden[:, 0].tolist() == [0, -2, 0, -4, 0, 0], "only where a loss reads it"
    assert batch.loss_mask.int().tolist() == [0, 1, 0, 1, 0, 0]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 0]
    assert batch.document_ids.tolist() == [0, 0, 0, 0, -1, -1]
    assert batch.start_mask.int().tolist() == [1, 1, 1, 1, 0, 0]
    assert batch.document_lengths == (5,)
    assert batch.num_rows == 4


def test_gate_belongs_to_the_next_token() -> None:
    """Ids 0..5 with mask 0 0 1 1 1 0: rows 1, 2 and 3 are gated, and there is no row 5."""
    mask = torch.tensor([0, 0, 1, 1, 1, 0], dtype=torch.bool)
    batch = lay([whole(0, 6)], [replace(numbered(6), loss_mask=mask)], max_seq_len=5)
    assert batch.loss_mask.nonzero().flatten().tolist() == [1, 2, 3]


def test_documents_do_not_reach_into_each_other() -> None:
    batch = lay(
        [whole(4, 3), whole(9, 4)],
        [all_gated(numbered(3, 10)), all_gated(numbered(4, 20))],
        6,
        2,
        7,
    )
    assert batch.input_ids.tolist() == [11, 12, 21, 22, 23, 0]
    assert batch.next_ids.tolist() == [12, -1, 22, 23, -1, -1]
    assert batch.aux_hidden[:, 0].tolist() == [10, 11, 20, 21, 22, 0]
    assert batch.last_hidden[:, 0].tolist() == [-11, -12, -21, -22, -23, 0]
    assert batch.document_ids.tolist() == [0, 0, 1, 1, 1, -1]
    assert batch.position_ids.tolist() == [0, 1, 0, 1, 2, 0]
    assert batch.document_lengths == (3, 4)
    assert (batch.epoch, batch.index) == (2, 7)


def test_segment_keeps_its_place_in_the_document() -> None:
    segment = Segment(0, start=2, stop=8, own_start=4, own_stop=6)
    batch = lay([segment], [all_gated(numbered(11))], max_seq_len=7)
    assert batch.input_ids.tolist() == [3, 4, 5, 6, 7, 8, 0]
    assert batch.next_ids.tolist() == [4, 5, 6, 7, 8, 9, -1]
    assert batch.aux_hidden[:, 0].tolist() == [2, 3, 4, 5, 6, 7, 0]
    assert batch.last_hidden[:, 0].tolist() == [-3, -4, -5, -6, -7, -8, 0]
    assert batch.position_ids.tolist() == [2, 3, 4, 5, 6, 7, 0]
    assert batch.start_mask.int().tolist() == [0, 0, 1, 1, 0, 0, 0]
    assert batch.document_lengths == (11,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_states_are_copied_bit_by_bit(dtype: torch.dtype) -> None:
    sample = replace(
        all_gated(numbered(4)),
        aux_hidden=torch.randn(4, AUX * HIDDEN).to(dtype),
        last_hidden=torch.randn(4, HIDDEN).to(dtype),
    )
    batch = lay([whole(0, 4)], [sample], max_seq_len=5)
    assert torch.equal(batch.aux_hidden[:3], sample.aux_hidden[:3])
    assert torch.equal(batch.last_hidden[:3], sample.last_hidden[1:])
    assert batch.aux_hidden.dtype is batch.last_hidden.dtype is dtype


def test_empty_pack_has_the_shape_of_the_data() -> None:
    planes = StatePlanes(StateLayout(2, 3, 50), torch.bfloat16, BufferPool())
    batch = lay_rows([], [], 4, planes, epoch=1, index=3)
    assert batch.aux_hidden.shape == (4, 6)
    assert batch.last_hidden.shape == (4, 3)
    assert batch.aux_hidden.dtype is batch.last_hidden.dtype is torch.bfloat16
    assert not batch.aux_hidden.any()
    assert not batch.last_hidden.any()
    assert batch.num_rows == 0
    assert batch.document_ids.tolist() == [-1] * 4
    assert len(batch.trim()) == 0
    assert (batch.epoch, batch.index) == (1, 3)


@given(lengths=st.lists(st.integers(2, 12), min_size=1, max_size=5), steps=st.integers(1, 4))
def test_rows_of_a_step_follow_from_the_lengths_alone(lengths: list[int], steps: int) -> None:
    """Row i exists at step s while i + s is a row of its document: max(0, n - 1 - s) rows."""
    samples = [numbered(n, 100 * d) for d, n in enumerate(lengths)]
    segments = [whole(d, n) for d, n in enumerate(lengths)]
    batch = lay(segments, samples, max_seq_len=sum(lengths))
    for step in range(steps):
        rows = max(len(batch) - step, 0)
        same = (batch.document_ids[:rows] >= 0) & (
            batch.document_ids[step:] == batch.document_ids[:rows]
        )
        assert int(same.sum()) == sum(max(0, n - 1 - step) for n in lengths)
        distance = batch.input_ids[step:][same] - batch.aux_hidden[:rows, 0][same].long()
        assert (distance == step + 1).all(), "a target crosses into another document"


@given(tokens=st.integers(2, 60))
def test_segments_together_hold_every_chain_of_the_document(tokens: int) -> None:
    rule = PackingRule(9, LongDocuments.split, split_context_tokens=3, steps=3)
    sample = numbered(tokens)
    starts, gates = [], 0
    for segment in split_rows(0, tokens - 1, rule):
        batch = lay([segment], [sample], 9).trim()
        starts += batch.aux_hidden[batch.start_mask, 0].long().tolist()
        gates += int(batch.loss_mask[batch.start_mask].sum())
    assert starts == list(range(tokens - 1))
    assert gates == int(sample.loss_mask[1:].sum())


@given(gates=st.lists(st.booleans(), max_size=12))
def test_gated_ranges_are_the_runs_of_ones(gates: list[bool]) -> None:
    ranges = gated_ranges(torch.tensor(gates, dtype=torch.bool))
    inside = [any(start <= row < stop for start, stop in ranges) for row in range(len(gates))]
    assert inside == gates
    assert all(start - stop > 0 for (_, stop), (start, _) in pairwise(ranges))
    assert all(start < stop for start, stop in ranges)


def test_memory_that_was_used_before_leaves_nothing_behind() -> None:
    """Padding and rows without a gate are zero, whatever was in the memory."""
    planes = StatePlanes(StateLayout(AUX, HIDDEN, 50), torch.float64, BufferPool())
    used = lay_rows([], [], 6, planes)
    used.aux_hidden.fill_(7)
    used.last_hidden.fill_(7)
    places = used.aux_hidden.data_ptr(), used.last_hidden.data_ptr()
    del used
    batch = lay_rows([whole(0, 5)], [DocumentRows(numbered(5).loss_mask)], 6, planes)
    assert (batch.aux_hidden.data_ptr(), batch.last_hidden.data_ptr()) == places
    assert not batch.aux_hidden[4:].any()
    assert not batch.last_hidden[~batch.loss_mask].any()
