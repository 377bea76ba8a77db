"""Training-time test: unroll the drafter S steps over a pack, with the true tokens.

For a document of rows 0..4, what row i = 1 attends to (k0 keys of step 0, k1, k2 its own column)::

    step 0   token of row 1   fused aux state of row 1     k0[0] k0[1]
    step 1   token of row 2   row 1's output of step 0     k0[0] k0[1] k1[1]
    step 2   token of row 3   row 1's output of step 1     k0[0] k0[1] k1[1] k2[1]

Row i's query and key of step s stand at position i + s. This is what a server does when it drafts
from row i, except that a server feeds its own tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from eagle3.config import ComputeConfig
from eagle3.data.batch import PackedBatch
from eagle3.dims import AuxHidden, Computed
from eagle3.model.drafter import Drafter
from eagle3.model.projection import Projection
from eagle3.ops.ttt_attention import DocumentLayout, ttt_attention


@dataclass(frozen=True)
class StepRows:
    """Which rows a TTT step trains: row i of the chain against the verifier at row i + s."""

    starts: Int[Tensor, " R"]
    targets: Int[Tensor, " R"]


def step_rows(batch: PackedBatch, ttt_step: int) -> StepRows:
    """Rows i with a trained start, i + s in the same document, and gate l_{i+1+s} = 1.

    ``batch`` has no padding. For the documents [x0..x4] and [x0..x2], all gates on: rows 0..3 and
    4..5 at step 0; 0..2 and 4 at step 1; 0..1 at step 2.
    """
    end = max(len(batch) - ttt_step, 0)
    same = batch.document_ids[:end] == batch.document_ids[ttt_step:]
    keep = same & batch.start_mask[:end] & batch.loss_mask[ttt_step:]
    starts = keep.nonzero()[:, 0]
    return StepRows(starts=starts, targets=starts + ttt_step)


def read_rows(batch: PackedBatch, ttt_steps: int) -> Int[Tensor, " A"]:
    """Rows that some step of :func:`step_rows` starts from, in increasing order.

    Only these need more than ``fc`` and their step-0 key and value: at later steps a row is seen by
    itself alone, and at step 0 the only decoder layer gives the other rows nothing else.
    """
    read = torch.zeros(len(batch), dtype=torch.bool, device=batch.input_ids.device)
    for step in range(ttt_steps):
        read[step_rows(batch, step).starts] = True
    return read.nonzero()[:, 0]


def unroll(
    drafter: Drafter,
    batch: PackedBatch,
    aux_hidden: AuxHidden,
    ttt_steps: int,
    compute: ComputeConfig,
    rows: Int[Tensor, " A"] | None = None,
) -> Iterator[Computed]:
    """Yield the layer output [A, H] (before the final norm) of steps 0..ttt_steps-1.

    ``batch`` has no padding (:meth:`PackedBatch.trim`); ``aux_hidden`` [T, K*H] are its aux states
    with noise and casts applied. A row past its document's end reads some other token: nothing
    but itself attends to it and :func:`step_rows` never trains it.

    Args:
        compute: which implementations run; its ``rows`` is the caller's to turn into ``rows``.
        rows: rows to compute, increasing; None: all.
    """
    layout = DocumentLayout.from_document_ids(batch.document_ids, rows)
    project = Projection(drafter, batch, rows, ttt_steps, compute.embedding_half)
    hidden = drafter.fuse(aux_hidden)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for step in range(ttt_steps):
        qkv, residual = project(step, hidden)
        keys.append(qkv.key)
        values.append(qkv.value)
        attended = ttt_attention(
            qkv.query,
            keys,
            values,
            layout,
            implementation=compute.attention,
            window=drafter.config.sliding_window,
        )
        output = drafter.layer.finish(attended, residual, compute.recompute)
        yield output
        hidden = drafter.feedback(output)
