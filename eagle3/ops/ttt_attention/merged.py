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
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from eagle3.ops import kernels
from eagle3.ops.ttt_attention import flash, own_column, reference
from eagle3.ops.ttt_attention.flash import Band, Gradients
from eagle3.ops.ttt_attention.layout import DocumentLayout


@dataclass(frozen=True)
class _Visible:
    """What a window leaves at TTT step s: the step-0 band, and own-column keys of late steps."""

    band: Band
    first_own: int
    """First step whose own-column key is visible; s + 1 where there is none."""

    @classmethod
    def at_step(cls, step: int, layout: DocumentLayout, window: int | None) -> _Visible:
        if window is None:
            return cls(Band(layout, reach=None), first_own=1)
        # The query of row i stands at position i + step, so i - j < window - step.
        return cls(Band(layout, window - step - 1), first_own=max(1, step - window + 1))

    @property
    def hides_step_zero(self) -> bool:
        return self.band.reach is not None and self.band.reach < 0


def attend(
    query: Tensor,
    step_keys: Sequence[Tensor],
    step_values: Sequence[Tensor],
    layout: DocumentLayout,
    window: int | None,
) -> Tensor:
    """Attention of the query rows, see :func:`eagle3.ops.ttt_attention.ttt_attention`.

    Where no flash operator fits (float32, float64 or an odd head size on CUDA, or no rows) the
    reference runs document by document: slower, the same numbers.
    """
    if query.shape[0] == 0 or not flash.supports(query):
        return reference.attend_by_document(query, step_keys, step_values, layout, window)
    visible = _Visible.at_step(len(step_keys) - 1, layout, window)
    tensors = [_last_contiguous(t) for t in (query, *step_keys, *step_values)]
    return _MergedAttention.apply(visible, *tensors)


def _own_column(query: Tensor) -> ModuleType:
    """One kernel where Triton runs, else plain PyTorch; both have ``merge`` and ``backward``."""
    if not kernels.available(query):
        return own_column
    from eagle3.ops.ttt_attention import own_column_triton  # not imported without a need

    return own_column_triton


def _last_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class _MergedAttention(torch.autograd.Function):
    """Inputs: visibility, query [A, Hq, D], then keys and values of steps 0..s.

    They are [L, Hkv, D] at step 0, [A, Hkv, D] later.
    """

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
            out, lse = _own_column(query).merge(query, out, lse, keys[own], values[own])
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
        own_grads = _own_column(query).backward(
            grad_out, query, out, lse, keys[own], values[own], grad_query
        )
        # Own-column keys that the window hides still belong to the graph, with zero gradients.
        unseen = [torch.zeros_like(key) for key in keys[1 : visible.first_own]]
        grad_keys = [first.key, *unseen, *(grad_key for grad_key, _ in own_grads)]
        grad_values = [first.value, *unseen, *(grad_value for _, grad_value in own_grads)]
        grads = (grad_query, *grad_keys, *grad_values)
        return (None, *(grad.to(query.dtype) for grad in grads))
