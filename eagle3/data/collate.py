"""Segments and their samples to a :class:`PackedBatch`: the only place where the shift happens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.data.batch import PackedBatch
from eagle3.data.formats import Sample
from eagle3.data.packing import Segment


@dataclass(frozen=True)
class StatePlanes:
    """Shape and dtype of the states of every pack of a directory."""

    aux_width: int
    """``num_aux_layers * H``"""
    hidden_size: int
    dtype: torch.dtype
    pin_memory: bool = False
    """Allocate page-locked memory, for asynchronous copies to a CUDA device."""

    @classmethod
    def of(cls, sample: Sample) -> StatePlanes:
        """As the states of ``sample``."""
        last = sample.last_hidden
        return cls(sum(block.shape[1] for block in sample.aux_hidden), last.shape[1], last.dtype)


def collate(
    segments: Sequence[Segment],
    samples: Sequence[Sample],
    max_seq_len: int,
    epoch: int = 0,
    index: int = 0,
    planes: StatePlanes | None = None,
) -> PackedBatch:
    """Lay ``segments`` end to end and pad to ``max_seq_len`` rows.

    ``samples[k]`` has the states of the tokens from ``segments[k].start`` to at least
    ``segments[k].stop``. Row i takes aux states of token i and everything else of token i + 1, as
    drawn in :mod:`eagle3.data.batch`. States are copied once, bit by bit. Without segments the
    pack is all padding, and ``planes`` must be given; else they default to the first sample's.
    """
    planes = planes or StatePlanes.of(samples[0])
    batch = _allocate(planes, segments, samples, max_seq_len, epoch, index)
    at = 0
    for k, (segment, sample) in enumerate(zip(segments, samples, strict=True)):
        _lay(batch, at, k, segment, sample)
        at += segment.rows
    batch.aux_hidden[at:].zero_()
    batch.last_hidden[at:].zero_()
    return batch


def _allocate(
    planes: StatePlanes,
    segments: Sequence[Segment],
    samples: Sequence[Sample],
    max_seq_len: int,
    epoch: int,
    index: int,
) -> PackedBatch:
    """Padding everywhere, but states left uninitialised: every row of them is written later."""

    def ids(value: int) -> Tensor:
        return torch.full((max_seq_len,), value, dtype=torch.int64, pin_memory=planes.pin_memory)

    def gates() -> Tensor:
        return torch.zeros(max_seq_len, dtype=torch.bool, pin_memory=planes.pin_memory)

    def states(width: int) -> Tensor:
        return torch.empty(max_seq_len, width, dtype=planes.dtype, pin_memory=planes.pin_memory)

    assert sum(segment.rows for segment in segments) <= max_seq_len, "the pack overflows"
    return PackedBatch(
        input_ids=ids(0),
        next_ids=ids(-1),
        aux_hidden=states(planes.aux_width),
        last_hidden=states(planes.hidden_size),
        loss_mask=gates(),
        document_ids=ids(-1),
        position_ids=ids(0),
        start_mask=gates(),
        document_lengths=tuple(len(sample) for sample in samples),
        epoch=epoch,
        index=index,
    )


def _lay(batch: PackedBatch, at: int, place: int, segment: Segment, sample: Sample) -> None:
    """Write the rows of ``segment`` from row ``at`` of the pack."""
    rows = segment.rows
    pack_rows = slice(at, at + rows)
    tokens = slice(segment.start + 1, segment.stop + 1)
    assert segment.stop < len(sample), "the segment reaches past its document"
    batch.input_ids[pack_rows] = sample.input_ids[tokens]
    batch.loss_mask[pack_rows] = sample.loss_mask[tokens]
    following = sample.input_ids[segment.start + 2 : segment.stop + 2]
    batch.next_ids[at : at + len(following)] = following
    batch.document_ids[pack_rows] = place
    batch.position_ids[pack_rows] = torch.arange(segment.start, segment.stop)
    origin = at - segment.start
    batch.start_mask[origin + segment.own_start : origin + segment.own_stop] = True
    column = 0
    for block in sample.aux_hidden:
        width = block.shape[1]
        batch.aux_hidden[pack_rows, column : column + width] = block[:rows]
        column += width
    batch.last_hidden[pack_rows] = sample.last_hidden[1 : rows + 1]
