"""TTT attention as flash attention over step-0 keys merged with the own-column keys.

With scale c, row i and head h left out, own-column keys j = 1..s::

    forward     s_j = c q.k_j
                lse = logaddexp(lse_0, logsumexp_j s_j)
                out = exp(lse_0 - lse) out_0 + sum_j p_j v_j          p_j = exp(s_j - lse)
    backward    dq, dk_0, dv_0 = flash backward with the merged out and lse: its probabilities are
                then the true ones, and its delta = do.out the true delta
                ds_j = p_j (do.v_j - delta)
                dq += c ds_j k_j     dk_j = c ds_j q     dv_j = p_j do      (summed over the group)

Saved for backward: query, keys, values, out, lse. Never made: a score or mask matrix over all rows,
repeated key/value heads, concatenated keys of several steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from eagle3.ops.ttt_attention import flash, reference
from eagle3.ops.ttt_attention.flash import Band, Gradients


@dataclass(frozen=True)
class _Visible:
    """What a window leaves at TTT step s: the step-0 band, and own-column keys of late steps."""

    band: Band
    first_own: int
    """First step whose own-column key is visible; s + 1 where there is none."""

    @classmethod
    def at_step(cls, step: int, row_starts: tuple[int, ...], window: int | None) -> _Visible:
        if window is None:
            return cls(Band(row_starts, reach=None), first_own=1)
        # The query of row i stands at position i + step, so i - j < window - step.
        return cls(Band(row_starts, window - step - 1), first_own=max(1, step - window + 1))

    @property
    def hides_step_zero(self) -> bool:
        return self.band.reach is not None and self.band.reach < 0


def attend(
    query: Tensor,
    step_keys: Sequence[Tensor],
    step_values: Sequence[Tensor],
    row_starts: tuple[int, ...],
    window: int | None,
) -> Tensor:
    """Attention of all rows, see :func:`eagle3.ops.ttt_attention.ttt_attention`.

    Where no flash operator fits (float32, float64 or an odd head size on CUDA, or no rows) the
    reference runs document by document: slower, the same numbers.
    """
    if query.shape[0] == 0 or not flash.supports(query):
        return reference.attend_by_document(query, step_keys, step_values, row_starts, window)
    visible = _Visible.at_step(len(step_keys) - 1, row_starts, window)
    tensors = [_last_contiguous(t) for t in (query, *step_keys, *step_values)]
    return _MergedAttention.apply(visible, *tensors)


def _last_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class _MergedAttention(torch.autograd.Function):
    """Inputs: visibility, query [L, Hq, D], then keys and values of steps 0..s, [L, Hkv, D]."""

    @staticmethod
    def forward(ctx: Any, visible: _Visible, query: Tensor, *keys_values: Tensor) -> Tensor:
        steps = len(keys_values) // 2
        keys, values = keys_values[:steps], keys_values[steps:]
        if visible.hides_step_zero:
            out = torch.zeros_like(query)
            dtype = torch.promote_types(query.dtype, torch.float32)
            lse = query.new_full(query.shape[:2], -torch.inf, dtype=dtype)
        else:
            out, lse = flash.forward(query, keys[0], values[0], visible.band)
        own = slice(visible.first_own, steps)
        if keys[own]:
            out, lse = _merge(query, out, lse, keys[own], values[own])
        ctx.save_for_backward(query, out, lse, *keys_values)
        ctx.visible = visible
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, out, lse, *keys_values = ctx.saved_tensors
        visible: _Visible = ctx.visible
        steps = len(keys_values) // 2
        keys, values = keys_values[:steps], keys_values[steps:]
        if visible.hides_step_zero:
            first = Gradients(*(torch.zeros_like(t) for t in (query, keys[0], values[0])))
        else:
            first = flash.backward(grad_out, query, keys[0], values[0], out, lse, visible.band)
        own = slice(visible.first_own, steps)
        grad_query = first.query.to(lse.dtype)
        own_grads = _own_backward(grad_out, query, out, lse, keys[own], values[own], grad_query)
        # Own-column keys that the window hides still belong to the graph, with zero gradients.
        unseen = [torch.zeros_like(key) for key in keys[1 : visible.first_own]]
        grad_keys = [first.key, *unseen, *(grad_key for grad_key, _ in own_grads)]
        grad_values = [first.value, *unseen, *(grad_value for _, grad_value in own_grads)]
        grads = (grad_query, *grad_keys, *grad_values)
        return (None, *(grad.to(query.dtype) for grad in grads))


def _merge(
    query: Tensor,
    out: Tensor,
    lse: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Out and log-sum-exp over step-0 keys, extended by the own-column keys."""
    kv_heads = own_keys[0].shape[1]
    grouped_query = _grouped(query.to(lse.dtype), kv_heads)
    grouped_lse = _grouped(lse, kv_heads)
    scores = [_own_scores(grouped_query, key) for key in own_keys]
    merged = torch.logsumexp(torch.stack([grouped_lse, *scores]), dim=0)
    total = _grouped(out.to(lse.dtype), kv_heads) * (grouped_lse - merged).exp()[..., None]
    for score, value in zip(scores, own_values, strict=True):
        total.addcmul_((score - merged).exp()[..., None], _beside_group(value, lse.dtype))
    return total.flatten(1, 2).to(query.dtype), merged.flatten(1, 2)


def _own_backward(
    grad_out: Tensor,
    query: Tensor,
    out: Tensor,
    lse: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
    grad_query: Tensor,
) -> list[tuple[Tensor, Tensor]]:
    """Gradients of each own-column key and value, in lse's dtype; adds to ``grad_query``."""
    if not own_keys:
        return []
    kv_heads = own_keys[0].shape[1]
    scale = query.shape[-1] ** -0.5
    query, grad_out, out, lse = (
        _grouped(t.to(lse.dtype), kv_heads) for t in (query, grad_out, out, lse)
    )
    # From the rounded out that the flash backward also takes: both parts need the same delta.
    delta = (grad_out * out).sum(-1)
    grads = []
    for own_key, own_value in zip(own_keys, own_values, strict=True):
        key, value = (_beside_group(t, lse.dtype) for t in (own_key, own_value))
        weight = (_own_scores(query, own_key) - lse).exp()
        grad_score = scale * weight * ((grad_out * value).sum(-1) - delta)
        _grouped(grad_query, kv_heads).addcmul_(grad_score[..., None], key)
        grad_key = (grad_score[..., None] * query).sum(2)
        grad_value = (weight[..., None] * grad_out).sum(2)
        grads.append((grad_key, grad_value))
    return grads


def _own_scores(grouped_query: Tensor, key: Tensor) -> Tensor:
    """[L, Hkv, G] scaled scores of each row's query against the key of its own column."""
    scale = grouped_query.shape[-1] ** -0.5
    return (grouped_query * _beside_group(key, grouped_query.dtype)).sum(-1) * scale


def _grouped(heads: Tensor, kv_heads: int) -> Tensor:
    """[L, Hq, ...] as [L, Hkv, G, ...], a view."""
    return heads.unflatten(1, (kv_heads, -1))


def _beside_group(key: Tensor, dtype: torch.dtype) -> Tensor:
    """[L, Hkv, D] as [L, Hkv, 1, D]."""
    return key.to(dtype)[:, :, None]
