"""Ground truth of the TTT attention: one dense softmax over step-0 keys and own-column keys.

Any device and dtype, differentiable by autograd; float32 at least inside. Memory is L x L a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def attend(
    query: Tensor,
    step_keys: Sequence[Tensor],
    step_values: Sequence[Tensor],
    row_starts: tuple[int, ...],
    window: int | None,
) -> Tensor:
    """Attention of all rows at once, see :func:`eagle3.ops.ttt_attention.ttt_attention`."""
    rows, query_heads, head_dim = query.shape
    step = len(step_keys) - 1
    dtype = torch.promote_types(query.dtype, torch.float32)
    group = query_heads // step_keys[0].shape[1]
    keys = [key.to(dtype).repeat_interleave(group, dim=1) for key in step_keys]
    values = [value.to(dtype).repeat_interleave(group, dim=1) for value in step_values]
    scaled = query.to(dtype) * head_dim**-0.5

    hidden = ~_visible(row_starts, step, window, query.device)
    scores = torch.einsum("ihd,jhd->ihj", scaled, keys[0])
    columns = [scores.masked_fill(hidden[:, None, :], -torch.inf)]
    for key_step, key in enumerate(keys[1:], start=1):
        own = (scaled * key).sum(-1, keepdim=True)
        if window is not None and step - key_step >= window:
            own = own.masked_fill(torch.ones_like(own, dtype=torch.bool), -torch.inf)
        columns.append(own)
    weights = torch.softmax(torch.cat(columns, dim=-1), dim=-1)

    out = torch.einsum("ihj,jhd->ihd", weights[..., :rows], values[0])
    for key_step, value in enumerate(values[1:]):
        out = out + weights[..., rows + key_step, None] * value
    return out.to(query.dtype)


def attend_by_document(
    query: Tensor,
    step_keys: Sequence[Tensor],
    step_values: Sequence[Tensor],
    row_starts: tuple[int, ...],
    window: int | None,
) -> Tensor:
    """The same numbers document by document: memory of the longest document instead of all rows."""
    if len(row_starts) <= 2:
        return attend(query, step_keys, step_values, row_starts, window)
    parts = [
        attend(
            query[start:stop],
            [key[start:stop] for key in step_keys],
            [value[start:stop] for value in step_values],
            (0, stop - start),
            window,
        )
        for start, stop in pairwise(row_starts)
    ]
    return torch.cat(parts)


def _visible(
    row_starts: tuple[int, ...], step: int, window: int | None, device: torch.device
) -> Tensor:
    """bool [L, L]: may the query of row i at this step see the step-0 key of row j?"""
    lengths = torch.tensor([b - a for a, b in pairwise(row_starts)], dtype=torch.int64)
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(device)
    row = torch.arange(row_starts[-1], device=device)
    visible = (document[:, None] == document[None, :]) & (row[:, None] >= row[None, :])
    if window is not None:
        visible = visible & (row[:, None] + step - row[None, :] < window)
    return visible
