"""TTT attention as PyTorch's own attention under a dense mask: plain, fast for short packs.

Keys and values of all steps are concatenated, and a mask of A x (L + s A) says who sees whom, made
anew at every step. This is how trainers without a kernel of their own do it; here it is what the
benchmarks compare with. Any device and dtype, differentiable by autograd.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.ops.ttt_attention.layout import DocumentLayout
from eagle3.ops.ttt_attention.reference import own_key_visible, visible_keys


def attend(
    query: Tensor,
    step_keys: Sequence[Tensor],
    step_values: Sequence[Tensor],
    layout: DocumentLayout,
    window: int | None,
) -> Tensor:
    """Attention of all query rows, see :func:`eagle3.ops.ttt_attention.ttt_attention`."""
    step, group = len(step_keys) - 1, query.shape[1] // step_keys[0].shape[1]
    columns = [visible_keys(layout, step, window, query.device)]
    own = torch.eye(query.shape[0], dtype=torch.bool, device=query.device)
    for key_step in range(1, step + 1):
        columns.append(own if own_key_visible(step, key_step, window) else torch.zeros_like(own))
    hidden = ~torch.cat(columns, dim=1)
    mask = query.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
    keys, values = (
        torch.cat(list(steps)).repeat_interleave(group, dim=1).transpose(0, 1)[None]
        for steps in (step_keys, step_values)
    )
    out = F.scaled_dot_product_attention(query.transpose(0, 1)[None], keys, values, attn_mask=mask)
    return out[0].transpose(0, 1)
