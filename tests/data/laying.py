"""Packs of documents that are in memory, laid by the package and filled without files."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eagle3.data.batch import PackedBatch
from eagle3.data.buffers import BufferPool
from eagle3.data.collate import DocumentRows, StatePlanes, lay_ids, lay_rows, state_targets
from eagle3.data.layout import StateLayout
from eagle3.data.packing import Segment
from eagle3.data.sample import Sample


def lay(
    segments: Sequence[Segment],
    samples: Sequence[Sample],
    max_seq_len: int,
    epoch: int = 0,
    index: int = 0,
) -> PackedBatch:
    """``samples[k]`` is the whole document of ``segments[k]``; at least one."""
    hidden_size = samples[0].last_hidden.shape[1]
    layout = StateLayout(samples[0].aux_hidden.shape[1] // hidden_size, hidden_size, 1)
    planes = StatePlanes(layout, samples[0].last_hidden.dtype, BufferPool())
    rows = [DocumentRows(sample.loss_mask) for sample in samples]
    batch = lay_rows(segments, rows, max_seq_len, planes, epoch, index)
    targets = state_targets(batch, segments, layout)
    for (at, segment, wanted), sample in zip(targets, samples, strict=True):
        lay_ids(batch, at, segment, sample.input_ids)
        states = torch.cat((sample.aux_hidden, sample.last_hidden), dim=1)
        for target in wanted:
            columns = slice(target.columns.first, target.columns.stop)
            target.out.copy_(states[target.start : target.stop, columns])
    return batch
