"""Segments to a :class:`PackedBatch`: the only place where the shift happens.

A pack is allocated whole. What the index knows is laid at once (:func:`lay_rows`); token ids and
states are then read straight into it, in any order: :func:`lay_ids` and :func:`state_targets` say
what of a document goes where.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from eagle3.data.batch import PackedBatch
from eagle3.data.buffers import HostMemory
from eagle3.data.layout import StateLayout
from eagle3.data.masks import supervised_runs
from eagle3.data.packing import Segment
from eagle3.data.reading import Target


@dataclass(frozen=True)
class DocumentRows:
    """What is known of a document before it is read."""

    loss_mask: Bool[Tensor, " N"]
    """bool, the whole document."""
    source: str = ""
    """Label of where it came from."""

    def __len__(self) -> int:
        return self.loss_mask.shape[0]


@dataclass(frozen=True)
class StatePlanes:
    """Shape, dtype and memory of the states of every pack."""

    layout: StateLayout
    dtype: torch.dtype
    memory: HostMemory


def lay_rows(
    segments: Sequence[Segment],
    documents: Sequence[DocumentRows],
    max_seq_len: int,
    planes: StatePlanes,
    epoch: int = 0,
    index: int = 0,
) -> PackedBatch:
    """Lay ``segments`` end to end and pad to ``max_seq_len`` rows.

    ``documents[k]`` is the one of ``segments[k]``. Row i takes aux states of token i and
    everything else of token i + 1, as drawn in :mod:`eagle3.data.batch`. Without segments the pack
    is all padding. Token ids are those of padding, and states are uninitialised, but rows of states
    that nothing will be read into are zero.
    """
    batch = _allocate(planes, segments, documents, max_seq_len, epoch, index)
    at = 0
    for place, (segment, document) in enumerate(zip(segments, documents, strict=True)):
        _lay(batch, at, place, segment, document)
        at += segment.rows
    _zero(batch.aux_hidden[at:])
    unread = 0
    for first, stop in (*gated_ranges(batch.loss_mask), (max_seq_len, max_seq_len)):
        _zero(batch.last_hidden[unread:first])
        unread = stop
    return batch


def lay_ids(batch: PackedBatch, at: int, segment: Segment, input_ids: Int[Tensor, " N"]) -> None:
    """Write the token ids of the whole document to where ``segment`` begins, row ``at``."""
    assert segment.stop < len(input_ids), "the segment reaches past its document"
    batch.input_ids[at : at + segment.rows] = input_ids[segment.start + 1 : segment.stop + 1]
    following = input_ids[segment.start + 2 : segment.stop + 2]
    batch.next_ids[at : at + len(following)] = following


def state_targets(
    batch: PackedBatch, segments: Sequence[Segment], layout: StateLayout
) -> Iterator[tuple[int, Segment, list[Target]]]:
    """Row of each segment's begin in ``batch``, which :func:`lay_rows` made of them, and where its
    states go.

    The last state is read only for rows whose gate is one: no loss reads the others.
    """
    at = 0
    for segment in segments:
        rows = slice(at, at + segment.rows)
        targets = [Target(layout.aux, segment.start, batch.aux_hidden[rows])]
        for first, stop in gated_ranges(batch.loss_mask[rows]):
            out = batch.last_hidden[at + first : at + stop]
            targets.append(Target(layout.last, segment.start + 1 + first, out))
        yield at, segment, targets
        at += segment.rows


def gated_ranges(gates: Bool[Tensor, " N"]) -> list[tuple[int, int]]:
    """The runs of ones."""
    return [(start, stop) for start, stop in supervised_runs(gates.numpy()).tolist()]


def _zero(states: Tensor) -> None:
    """Without the threads that PyTorch would start for each of ours."""
    states.view(torch.uint8).numpy()[:] = np.uint8(0)


def _allocate(
    planes: StatePlanes,
    segments: Sequence[Segment],
    documents: Sequence[DocumentRows],
    max_seq_len: int,
    epoch: int,
    index: int,
) -> PackedBatch:
    """Padding everywhere, but states left uninitialised."""
    memory, layout = planes.memory, planes.layout

    def ids(value: int) -> Tensor:
        return torch.full((max_seq_len,), value, dtype=torch.int64, pin_memory=memory.pinned)

    def gates() -> Tensor:
        return torch.zeros(max_seq_len, dtype=torch.bool, pin_memory=memory.pinned)

    assert sum(segment.rows for segment in segments) <= max_seq_len, "the pack overflows"
    return PackedBatch(
        input_ids=ids(0),
        next_ids=ids(-1),
        aux_hidden=memory.empty(max_seq_len, layout.aux_width, planes.dtype),
        last_hidden=memory.empty(max_seq_len, layout.hidden_size, planes.dtype),
        loss_mask=gates(),
        document_ids=ids(-1),
        position_ids=ids(0),
        start_mask=gates(),
        document_lengths=tuple(len(document) for document in documents),
        document_sources=tuple(document.source for document in documents),
        epoch=epoch,
        index=index,
    )


def _lay(batch: PackedBatch, at: int, place: int, segment: Segment, document: DocumentRows) -> None:
    """Write what the index knows of ``segment`` from row ``at`` of the pack."""
    rows = slice(at, at + segment.rows)
    batch.loss_mask[rows] = document.loss_mask[segment.start + 1 : segment.stop + 1]
    batch.document_ids[rows] = place
    batch.position_ids[rows] = torch.arange(segment.start, segment.stop)
    origin = at - segment.start
    batch.start_mask[origin + segment.own_start : origin + segment.own_stop] = True
