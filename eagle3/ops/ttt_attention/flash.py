"""Causal attention inside documents with its log-sum-exp, by PyTorch's own flash operators.

Row i sees rows max(start of its document, i - reach) .. i. Out is [L, Hq, D] in the query's dtype,
the log-sum-exp [L, Hq] in float32 (float64 for float64). Backward takes out and log-sum-exp from
the caller, so that they may also count keys these operators never saw (see ``merged``).

======  ==========================================================  ============================
device  operator                                                    documents, window
======  ==========================================================  ============================
CPU     ``aten._scaled_dot_product_flash_attention_for_cpu``        one call a document; a window
                                                                    as blocks of rows under an
                                                                    additive band mask
other   ``aten._flash_attention_forward`` with cumulative lengths   one call; ``window_size_left``
======  ==========================================================  ============================

The last axis of query, key and value must be contiguous (the CPU operator does not check it and
would give wrong numbers); any strides will do for the gradient of the output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

_aten = torch.ops.aten

_WINDOW_BLOCK_ROWS = 256
"""Rows of one masked call on CPU; keys and mask columns are at most ``reach`` more."""


@dataclass(frozen=True)
class Band:
    """Which keys a row sees: its document's, at most ``reach`` rows back (None: from the start)."""

    row_starts: tuple[int, ...]
    reach: int | None

    @property
    def longest(self) -> int:
        """Rows of the longest document."""
        return max(stop - start for start, stop in pairwise(self.row_starts))


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
    """Output [L, Hq, D] and log-sum-exp [L, Hq]; L >= 1."""
    run = _cpu_forward if query.device.type == "cpu" else varlen_forward
    return run(query, key, value, band)


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    band: Band,
) -> Gradients:
    """Gradients through the banded keys, with probabilities exp(score - lse); L >= 1."""
    run = _cpu_backward if query.device.type == "cpu" else varlen_backward
    return run(grad_out, query, key, value, out, lse, band)


def varlen_forward(query: Tensor, key: Tensor, value: Tensor, band: Band) -> tuple[Tensor, Tensor]:
    """All documents in one call; the operator's log-sum-exp is [Hq, L]."""
    lengths = _cumulative(band, query.device)
    # window_size_right = 0 is what causal means, but said here it also keeps the operator from
    # folding query heads into rows when all documents have one row, which permutes its lse.
    out, lse, *_ = _aten._flash_attention_forward(
        query, key, value, lengths, lengths, band.longest, band.longest, 0.0, True, False,
        scale=query.shape[-1] ** -0.5, window_size_left=_window_left(band), window_size_right=0,
    )  # fmt: skip
    return out, lse.t()


def varlen_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    band: Band,
) -> Gradients:
    """Gradients of :func:`varlen_forward`; the kernel reads lse by pointer as dense [Hq, L]."""
    lengths = _cumulative(band, query.device)
    # Random state of a dropout that is 0, never read.
    rng_state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    unused = torch.zeros((), dtype=torch.uint64, device=query.device)
    return Gradients(
        *_aten._flash_attention_backward(
            grad_out, query, key, value, out, lse.t().contiguous(), lengths, lengths,
            band.longest, band.longest, 0.0, True, rng_state, unused,
            scale=query.shape[-1] ** -0.5, window_size_left=_window_left(band),
            window_size_right=0,
        )
    )  # fmt: skip


def _window_left(band: Band) -> int:
    return -1 if band.reach is None else band.reach


def _cumulative(band: Band, device: torch.device) -> Tensor:
    # Pinned and non-blocking: the copy must not make the host wait for the device.
    pin = device.type == "cuda"
    starts = torch.tensor(band.row_starts, dtype=torch.int32, pin_memory=pin)
    return starts.to(device, non_blocking=True)


def _cpu_forward(query: Tensor, key: Tensor, value: Tensor, band: Band) -> tuple[Tensor, Tensor]:
    out = query.new_empty(query.shape)
    dtype = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_empty(query.shape[:2], dtype=dtype)
    query, key, value, heads_out = (_heads_first(t) for t in (query, key, value, out))
    heads_lse = lse.t()[None]
    for part in _parts(band):
        mask = part.mask(query.dtype)
        part_out, part_lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            part.rows(query), part.keys(key), part.keys(value), 0.0, mask is None, attn_mask=mask
        )
        part.rows(heads_out).copy_(part_out)
        part.rows(heads_lse).copy_(part_lse)
    return out, lse


def _cpu_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    band: Band,
) -> Gradients:
    # Keys of a window are met by several blocks: sum in lse's dtype, not in bfloat16.
    grads = Gradients(*(t.new_zeros(t.shape, dtype=lse.dtype) for t in (query, key, value)))
    heads_grads = Gradients(*(_heads_first(t) for t in grads))
    grad_out, query, key, value, out = (_heads_first(t) for t in (grad_out, query, key, value, out))
    heads_lse = lse.t()[None]
    for part in _parts(band):
        mask = part.mask(query.dtype)
        part_grads = Gradients(
            *_aten._scaled_dot_product_flash_attention_for_cpu_backward(
                part.rows(grad_out), part.rows(query), part.keys(key), part.keys(value),
                part.rows(out), part.rows(heads_lse), 0.0, mask is None, attn_mask=mask,
            )
        )  # fmt: skip
        part.rows(heads_grads.query).copy_(part_grads.query)
        part.keys(heads_grads.key).add_(part_grads.key)
        part.keys(heads_grads.value).add_(part_grads.value)
    return grads


class _Part(NamedTuple):
    """One CPU call: rows ``first:stop`` against keys ``first_key:stop`` of the same document."""

    first: int
    first_key: int
    stop: int
    reach: int | None
    """None where plain causal attention is what the band says."""

    def rows(self, heads_first: Tensor) -> Tensor:
        """The rows of a [1, H, L, ...] tensor, a view."""
        return heads_first.narrow(2, self.first, self.stop - self.first)

    def keys(self, heads_first: Tensor) -> Tensor:
        """The keys of a [1, H, L, ...] tensor, a view."""
        return heads_first.narrow(2, self.first_key, self.stop - self.first_key)

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """Additive [rows, keys] mask of the band, None for plain causal attention."""
        if self.reach is None:
            return None
        rows = torch.arange(self.first, self.stop)[:, None]
        back = rows - torch.arange(self.first_key, self.stop)[None, :]
        hidden = (back < 0) | (back > self.reach)
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)


def _parts(band: Band) -> Iterator[_Part]:
    for start, stop in pairwise(band.row_starts):
        if band.reach is None or stop - start <= band.reach + 1:
            yield _Part(start, start, stop, reach=None)
            continue
        for first in range(start, stop, _WINDOW_BLOCK_ROWS):
            last = min(first + _WINDOW_BLOCK_ROWS, stop)
            yield _Part(first, max(start, first - band.reach), last, band.reach)


def _heads_first(rows_heads_dim: Tensor) -> Tensor:
    """[L, H, D] as the operator's [1, H, L, D], a view."""
    return rows_heads_dim.transpose(0, 1)[None]
