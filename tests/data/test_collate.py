"""The shift, with the numbers of the drawing in :mod:`eagle3.data.batch`."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3.data.collate import StatePlanes, collate
from eagle3.data.formats import Sample
from eagle3.data.packing import PackingRule, Segment, split_rows
from eagle3.names import LongDocuments

AUX, HIDDEN = 2, 3


def numbered(tokens: int, base: int = 0) -> Sample:
    """Token j has id base + j; its aux states are base + j (+ 0.25), its last state -(base + j)."""
    index = torch.arange(base, base + tokens)
    state = index[:, None].repeat(1, HIDDEN).double()
    return Sample(
        input_ids=index,
        loss_mask=(index - base) % 2 == 0,
        aux_hidden=(state, state + 0.25),
        last_hidden=-state,
    )


def whole(document: int, tokens: int) -> Segment:
    return Segment(document, 0, tokens - 1, 0, tokens - 1)


def test_drawing() -> None:
    batch = collate([whole(0, 5)], [numbered(5)], max_seq_len=6)
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 0, 0]
    assert batch.next_ids.tolist() == [2, 3, 4, -1, -1, -1]
    assert batch.aux_hidden[:, 0].tolist() == [0, 1, 2, 3, 0, 0]
    assert batch.aux_hidden[:, HIDDEN].tolist() == [0.25, 1.25, 2.25, 3.25, 0, 0]
    assert batch.last_hidden[:, 0].tolist() == [-1, -2, -3, -4, 0, 0]
    assert batch.loss_mask.int().tolist() == [0, 1, 0, 1, 0, 0]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 0]
    assert batch.document_ids.tolist() == [0, 0, 0, 0, -1, -1]
    assert batch.start_mask.int().tolist() == [1, 1, 1, 1, 0, 0]
    assert batch.document_lengths == (5,)
    assert batch.num_rows == 4


def test_gate_belongs_to_the_next_token() -> None:
    """Ids 0..5 with mask 0 0 1 1 1 0: rows 1, 2 and 3 are gated, and there is no row 5."""
    mask = torch.tensor([0, 0, 1, 1, 1, 0], dtype=torch.bool)
    batch = collate([whole(0, 6)], [replace(numbered(6), loss_mask=mask)], max_seq_len=5)
    assert batch.loss_mask.nonzero().flatten().tolist() == [1, 2, 3]


def test_documents_do_not_reach_into_each_other() -> None:
    batch = collate([whole(4, 3), whole(9, 4)], [numbered(3, 10), numbered(4, 20)], 6, 2, 7)
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
    batch = collate([segment], [numbered(11).narrow(2, 9)], max_seq_len=7)
    assert batch.input_ids.tolist() == [3, 4, 5, 6, 7, 8, 0]
    assert batch.next_ids.tolist() == [4, 5, 6, 7, 8, 9, -1]
    assert batch.aux_hidden[:, 0].tolist() == [2, 3, 4, 5, 6, 7, 0]
    assert batch.last_hidden[:, 0].tolist() == [-3, -4, -5, -6, -7, -8, 0]
    assert batch.position_ids.tolist() == [2, 3, 4, 5, 6, 7, 0]
    assert batch.start_mask.int().tolist() == [0, 0, 1, 1, 0, 0, 0]
    assert batch.document_lengths == (11,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_states_are_copied_bit_by_bit(dtype: torch.dtype) -> None:
    sample = numbered(4)
    sample = replace(
        sample,
        aux_hidden=tuple(torch.randn(4, HIDDEN).to(dtype) for _ in range(AUX)),
        last_hidden=torch.randn(4, HIDDEN).to(dtype),
    )
    batch = collate([whole(0, 4)], [sample], max_seq_len=5)
    assert torch.equal(batch.aux_hidden[:3], torch.cat(sample.aux_hidden, dim=1)[:3])
    assert torch.equal(batch.last_hidden[:3], sample.last_hidden[1:])
    assert batch.aux_hidden.dtype is batch.last_hidden.dtype is dtype


def test_concatenated_aux_states_are_as_good() -> None:
    sample = numbered(5)
    joined = replace(sample, aux_hidden=(torch.cat(sample.aux_hidden, dim=1),))
    apart = collate([whole(0, 5)], [sample], max_seq_len=4)
    assert torch.equal(collate([whole(0, 5)], [joined], max_seq_len=4).aux_hidden, apart.aux_hidden)


def test_empty_pack_has_the_shape_of_the_data() -> None:
    batch = collate([], [], 4, epoch=1, index=3, planes=StatePlanes(6, 3, torch.bfloat16))
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
    batch = collate(segments, samples, max_seq_len=sum(lengths))
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
        batch = collate([segment], [sample.narrow(segment.start, segment.stop + 1)], 9).trim()
        starts += batch.aux_hidden[batch.start_mask, 0].long().tolist()
        gates += int(batch.loss_mask[batch.start_mask].sum())
    assert starts == list(range(tokens - 1))
    assert gates == int(sample.loss_mask[1:].sum())
