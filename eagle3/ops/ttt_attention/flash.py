"""Causal attention inside documents with its log-sum-exp, by PyTorch's own flash operators.

Query row i sees rows max(start of its document, i - reach) .. i. Out is [A, Hq, D] in the query's
dtype, the log-sum-exp [A, Hq] in float32 (float64 for float64). Backward takes out and log-sum-exp
from the caller, so that they may also count keys these operators never saw (see ``merged``).

======  ==========================================================  ============================
device  operator                                                    query rows, window
======  ==========================================================  ============================
CPU     ``aten._scaled_dot_product_flash_attention_for_cpu``        calls for each span of rows:
                                                                    keys before it in full, its
                                                                    own causally; a window as
                                                                    blocks of rows under an
                                                                    additive band mask
other   ``aten._flash_attention_forward`` with cumulative lengths   one call over all rows, zeros
                                                                    where no row asks;
                                                                    ``window_size_left``
======  ==========================================================  ============================

The last axis of query, key and value must be contiguous (the CPU operator does not check it and
would give wrong numbers); any strides will do for the gradient of the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3.ops.ttt_attention import flash_cpu
from eagle3.ops.ttt_attention.layout import DocumentLayout

_aten = torch.ops.aten


@dataclass(frozen=True)
class Band:
    """Which keys a row sees: its document's, at most ``reach`` rows back (None: from the start)."""

    layout: DocumentLayout
    reach: int | None


class Gradients(NamedTuple):
    """Gradients of query, key and value."""

    query: Tensor
    key: Tensor
    value: Tensor


def supports(query: Tensor) -> bool:
    """Whether a flash operator takes this dtype and head size on this device."""
    if query.device.type == "cpu":
        return True
    if query.is_cuda and torch.cuda.get_device_capability(query.device) < (8, 0):
        return False
    head_dim = query.shape[-1]
    return query.dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= 256


def forward(query: Tensor, key: Tensor, value: Tensor, band: Band) -> tuple[Tensor, Tensor]:
    """Output [A, Hq, D] and log-sum-exp [A, Hq] of queries [A, Hq, D], keys [L, Hkv, D]; A >= 1."""
    if query.device.type == "cpu":
        return flash_cpu.forward(query, key, value, band.layout, band.reach)
    return varlen_forward(query, key, value, band)


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    band: Band,
) -> Gradients:
    """Gradients through the banded keys, with probabilities exp(score - lse); A >= 1."""
    if query.device.type == "cpu":
        grads = flash_cpu.backward(grad_out, query, key, value, out, lse, band.layout, band.reach)
        return Gradients(*grads)
    return varlen_backward(grad_out, query, key, value, out, lse, band)


def varlen_forward(query: Tensor, key: Tensor, value: Tensor, band: Band) -> tuple[Tensor, Tensor]:
    """All documents in one call; the operator's log-sum-exp is [Hq, L]."""
    layout, lengths = band.layout, _cumulative(band, query.device)
    # window_size_right = 0 is what causal means, but said here it also keeps the operator from
    # folding query heads into rows when all documents have one row, which permutes its lse.
    out, lse, *_ = _aten._flash_attention_forward(
        _spread(query, layout), key, value, lengths, lengths, layout.longest, layout.longest, 0.0,
        True, False, scale=query.shape[-1] ** -0.5, window_size_left=_window_left(band),
        window_size_right=0,
    )  # fmt: skip
    return _gather(out, layout), _gather(lse.t(), layout)


def varlen_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    band: Band,
) -> Gradients:
    """Gradients of :func:`varlen_forward`; the kernel reads lse by pointer as dense [Hq, L].

    Where no row asks, the gradient of the output is zero, so nothing flows from there.
    """
    layout, lengths = band.layout, _cumulative(band, query.device)
    # Random state of a dropout that is 0, never read.
    rng_state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    unused = torch.zeros((), dtype=torch.uint64, device=query.device)
    grad_out, query, out, lse = (_spread(t, layout) for t in (grad_out, query, out, lse))
    grads = Gradients(
        *_aten._flash_attention_backward(
            grad_out, query, key, value, out, lse.t().contiguous(), lengths, lengths,
            layout.longest, layout.longest, 0.0, True, rng_state, unused,
            scale=query.shape[-1] ** -0.5, window_size_left=_window_left(band),
            window_size_right=0,
        )
    )  # fmt: skip
    return grads._replace(query=_gather(grads.query, layout))


def _spread(asked: Tensor, layout: DocumentLayout) -> Tensor:
    """[A, ...] as [L, ...] with zeros (finite, also as log-sum-exp) where no row asks."""
    if layout.query_rows is None:
        return asked
    rows = layout.query_rows.to(asked.device)
    return asked.new_zeros(layout.rows, *asked.shape[1:]).index_copy_(0, rows, asked)


def _gather(rows: Tensor, layout: DocumentLayout) -> Tensor:
    """The rows that ask, [L, ...] as [A, ...]."""
    return rows if layout.query_rows is None else rows[layout.query_rows.to(rows.device)]


def _window_left(band: Band) -> int:
    return -1 if band.reach is None else band.reach


def _cumulative(band: Band, device: torch.device) -> Tensor:
    # Pinned and non-blocking: the copy must not make the host wait for the device.
    pin = device.type == "cuda"
    starts = torch.tensor(band.layout.row_starts, dtype=torch.int32, pin_memory=pin)
    return starts.to(device, non_blocking=True)
