"""The CPU half of :mod:`eagle3.ops.ttt_attention.flash`: one call for each block of rows and keys.

::

    document      . . . . . . . . . .        . rows, x rows that ask
    span                x x x x x
    call 1        k k k                       all keys before the span, seen by every row of it
    call 2              k k k k k             the span's own keys, causal

Both calls of a span are merged through their log-sum-exp. Backward needs no merging: with the
log-sum-exp of all keys each call's probabilities are already the true ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3.ops.ttt_attention.layout import DocumentLayout, Span

_aten = torch.ops.aten

_WINDOW_BLOCK_ROWS = 256
"""Rows of one masked call; keys and mask columns are at most ``reach`` more."""


class _Call(NamedTuple):
    """Rows ``first:stop`` of a span's document against keys ``first_key:stop_key`` of it."""

    first: int
    stop: int
    first_key: int
    stop_key: int
    causal: bool
    reach: int | None = None
    """None: no mask beyond ``causal``."""
    again: bool = False
    """The rows have met other keys in the call before."""

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """Additive [rows, keys] mask of the band."""
        if self.reach is None:
            return None
        rows = torch.arange(self.first, self.stop)[:, None]
        back = rows - torch.arange(self.first_key, self.stop_key)[None, :]
        hidden = (back < 0) | (back > self.reach)
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)


def _calls(span: Span, reach: int | None) -> Iterator[_Call]:
    start, first, stop = span.document_start, span.first, span.stop
    if reach is None or stop - start <= reach + 1:
        if first > start:
            yield _Call(first, stop, start, first, causal=False)
        yield _Call(first, stop, first, stop, causal=True, again=first > start)
        return
    for block in range(first, stop, _WINDOW_BLOCK_ROWS):
        last = min(block + _WINDOW_BLOCK_ROWS, stop)
        yield _Call(block, last, max(start, block - reach), last, causal=False, reach=reach)


def forward(
    query: Tensor, key: Tensor, value: Tensor, layout: DocumentLayout, reach: int | None
) -> tuple[Tensor, Tensor]:
    """See :func:`eagle3.ops.ttt_attention.flash.forward`."""
    out = query.new_empty(query.shape)
    dtype = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_empty(query.shape[:2], dtype=dtype)
    key, value = _heads_first(key), _heads_first(value)
    for span in layout.spans:
        rows = _Rows(span)
        span_query = _heads_first(rows.spread(query))
        span_out, span_lse = rows.empty_like(query), rows.empty_like(lse)
        for call in _calls(span, reach):
            mask = call.mask(query.dtype)
            part = slice(call.first - span.first, call.stop - span.first)
            part_out, part_lse = _aten._scaled_dot_product_flash_attention_for_cpu(
                span_query[:, :, part], _keys(key, call), _keys(value, call), 0.0, call.causal,
                attn_mask=mask,
            )  # fmt: skip
            parts = part_out[0].transpose(0, 1), part_lse[0].t().to(dtype)
            if call.again:
                _merge(span_out, span_lse, *parts)
            else:
                span_out[part].copy_(parts[0])
                span_lse[part].copy_(parts[1])
        rows.gather(span_out, into=out)
        rows.gather(span_lse, into=lse)
    return out, lse


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: DocumentLayout,
    reach: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`eagle3.ops.ttt_attention.flash.backward`; gradients come in lse's dtype."""
    # Keys are met by several calls: sum in lse's dtype, not in bfloat16.
    grad_query, grad_key, grad_value = (
        t.new_zeros(t.shape, dtype=lse.dtype) for t in (query, key, value)
    )
    key, value = _heads_first(key), _heads_first(value)
    keys_grad, values_grad = _heads_first(grad_key), _heads_first(grad_value)
    for span in layout.spans:
        rows = _Rows(span)
        given = [_heads_first(rows.spread(t)) for t in (grad_out, query, out)]
        span_lse = rows.spread(lse).t()[None]
        span_grad = rows.zeros_like(grad_query)
        for call in _calls(span, reach):
            mask = call.mask(query.dtype)
            part = slice(call.first - span.first, call.stop - span.first)
            part_grad, part_query, part_out = (t[:, :, part] for t in given)
            grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                part_grad, part_query, _keys(key, call), _keys(value, call), part_out,
                span_lse[:, :, part], 0.0, call.causal, attn_mask=mask,
            )  # fmt: skip
            span_grad[part].add_(grads[0][0].transpose(0, 1))
            _keys(keys_grad, call).add_(grads[1])
            _keys(values_grad, call).add_(grads[2])
        rows.gather(span_grad, into=grad_query)
    return grad_query, grad_key, grad_value


class _Rows:
    """Rows of a span, taken from and put back among the query rows."""

    def __init__(self, span: Span) -> None:
        self._columns = span.columns
        self._length = span.stop - span.first
        self._offsets = None if span.offsets is None else torch.tensor(span.offsets)

    def spread(self, asked: Tensor) -> Tensor:
        """[A, ...] as the rows of the span; zeros where no row asks, a view where all do."""
        mine = asked[self._columns]
        if self._offsets is None:
            return mine
        return self.zeros_like(asked).index_copy_(0, self._offsets, mine)

    def gather(self, rows: Tensor, into: Tensor) -> None:
        """Put rows of the span back among all."""
        into[self._columns] = rows if self._offsets is None else rows[self._offsets]

    def empty_like(self, asked: Tensor) -> Tensor:
        """Memory for the rows of the span."""
        return asked.new_empty(self._length, *asked.shape[1:])

    def zeros_like(self, asked: Tensor) -> Tensor:
        """Zeros for the rows of the span."""
        return asked.new_zeros(self._length, *asked.shape[1:])


def _merge(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """Extend attention over some keys by attention of the same rows over others, in place."""
    merged = torch.logaddexp(lse, more_lse)
    total = out.to(lse.dtype) * (lse - merged).exp()[..., None]
    total.addcmul_(more_out.to(lse.dtype), (more_lse - merged).exp()[..., None])
    out.copy_(total)
    lse.copy_(merged)


def _keys(heads_first: Tensor, call: _Call) -> Tensor:
    """The keys of a call in a [1, H, L, D] tensor, a view."""
    return heads_first.narrow(2, call.first_key, call.stop_key - call.first_key)


def _heads_first(rows_heads_dim: Tensor) -> Tensor:
    """[L, H, D] as the operator's [1, H, L, D], a view."""
    return rows_heads_dim.transpose(0, 1)[None]
