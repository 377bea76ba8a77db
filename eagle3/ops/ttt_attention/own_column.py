"""Keys of the own column: merging them into flash attention, and their gradients.

The formulas stand in :mod:`eagle3.ops.ttt_attention.merged`. Scores are dot products of a row with
its own key of a later step, so nothing here is larger than the queries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge(
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


def backward(
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
    """[A, Hkv, G] scaled scores of each row's query against the key of its own column."""
    scale = grouped_query.shape[-1] ** -0.5
    return (grouped_query * _beside_group(key, grouped_query.dtype)).sum(-1) * scale


def _grouped(heads: Tensor, kv_heads: int) -> Tensor:
    """[A, Hq, ...] as [A, Hkv, G, ...], a view."""
    return heads.unflatten(1, (kv_heads, -1))


def _beside_group(key: Tensor, dtype: torch.dtype) -> Tensor:
    """[A, Hkv, D] as [A, Hkv, 1, D]."""
    return key.to(dtype)[:, :, None]
