"""Ground truth of the TTT attention: one dense softmax over step-0 keys and own-column keys.

Any device and dtype, differentiable by autograd; float32 at least inside. Memory is A x L a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from eagle3.ops.ttt_attention.layout import DocumentLayout


def attend(
    query: Tensor,
    step_keys: Sequence[Tensor],
    step_values: Sequence[Tensor],
    layout: DocumentLayout,
    window: int | None,
) -> Tensor:
    """Attention of all query rows at once, see :func:`eagle3.ops.ttt_attention.ttt_attention`."""
    _, query_heads, head_dim = query.shape
    step = len(step_keys) - 1
    dtype = torch.promote_types(query.dtype, torch.float32)
    group = query_heads // step_keys[0].shape[1]
    keys = [key.to(dtype).repeat_interleave(group, dim=1) for key in step_keys]
    values = [value.to(dtype).repeat_interleave(group, dim=1) for value in step_values]
    scaled = query.to(dtype) * head_dim**-0.5

    hidden = ~visible_keys(layout, step, window, query.device)
    scores = torch.einsum("ihd,jhd->ihj", scaled, keys[0])
    columns = [scores.masked_fill(hidden[:, None, :], -torch.inf)]
    for key_step, key in enumerate(keys[1:], start=1):
        own = (scaled * key).sum(-1, keepdim=True)
        if not own_key_visible(step, key_step, window):
            own = own.masked_fill(torch.ones_like(own, dtype=torch.bool), -torch.inf)
        columns.append(own)
    weights = torch.softmax(torch.cat(columns, dim=-1), dim=-1)

    out = torch.einsum("ihj,jhd->ihd", weights[..., : layout.rows], values[0])
    for key_step, value in enumerate(values[1:]):
        out = out + weights[..., layout.rows + key_step, None] * value
    return out.to(query.dtype)


def attend_by_document(
    query: Tensor,
    step_keys: Sequence[Tensor],
    step_values: Sequence[Tensor],
    layout: DocumentLayout,
    window: int | None,
) -> Tensor:
    """The same numbers document by document: memory of the longest document instead of all rows."""
    if len(layout.row_starts) <= 2:
        return attend(query, step_keys, step_values, layout, window)
    asking = layout.asking(query.device)
    edges = torch.searchsorted(asking, asking.new_tensor(layout.row_starts)).tolist()
    parts = []
    for (start, stop), (begin, end) in zip(
        pairwise(layout.row_starts), pairwise(edges), strict=True
    ):
        keys, values = (
            [steps[0][start:stop], *(step[begin:end] for step in steps[1:])]
            for steps in (step_keys, step_values)
        )
        alone = DocumentLayout((0, stop - start), asking[begin:end] - start)
        parts.append(attend(query[begin:end], keys, values, alone, window))
    return torch.cat(parts)


def visible_keys(
    layout: DocumentLayout, step: int, window: int | None, device: torch.device
) -> Bool[Tensor, "A L"]:
    """May the query of this row at this step see the step-0 key of that row?"""
    document = _documents(layout.row_starts, device)
    row, query_row = torch.arange(layout.rows, device=device), layout.asking(device)
    visible = document[query_row][:, None] == document[None, :]
    visible = visible & (query_row[:, None] >= row[None, :])
    if window is not None:
        visible = visible & (query_row[:, None] + step - row[None, :] < window)
    return visible


def own_key_visible(step: int, key_step: int, window: int | None) -> bool:
    """May a query at ``step`` see the key of its own column at ``key_step``?"""
    return window is None or step - key_step < window


def _documents(row_starts: tuple[int, ...], device: torch.device) -> Int[Tensor, " L"]:
    lengths = torch.tensor([b - a for a, b in pairwise(row_starts)], dtype=torch.int64)
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(device)
