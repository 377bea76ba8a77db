"""Losses of rows of logits as one differentiable function, by implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from eagle3.ops.distillation import closed_form
from eagle3.ops.distillation.reference import Distributions, mixed_loss

Mix = Sequence[tuple[str, float]]


class _ClosedForm(torch.autograd.Function):
    """Each row weighs one, and the upstream gradient scales its gradient afterwards."""

    @staticmethod
    def forward(ctx: Any, draft: Tensor, verifier: Tensor, mix: Mix) -> Tensor:
        gradient = draft.clone()
        rows = torch.arange(draft.shape[0])
        ones = draft.new_ones(draft.shape[0])
        found = closed_form.row_statistics(gradient, verifier, rows, mix, weights=ones)
        assert torch.equal(found.draft_best, draft.argmax(-1))
        ctx.save_for_backward(gradient)
        return found.loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad[:, None].to(gradient.dtype), None, None


def closed(draft: Tensor, verifier: Tensor, mix: Mix) -> Tensor:
    """[R] losses through the closed forms."""
    loss: Tensor = _ClosedForm.apply(draft, verifier, mix)
    return loss


ROW_LOSSES: dict[str, Callable[[Tensor, Tensor, Mix], Tensor]] = {
    "reference": mixed_loss,
    "closed_form": closed,
}


def overlap(draft: Tensor, verifier: Tensor) -> Tensor:
    """[R] sum_v min(p_v, q_v), the same by both implementations."""
    plain = Distributions(draft.detach(), verifier.detach()).overlap
    rows = torch.arange(draft.shape[0])
    found = closed_form.row_statistics(
        draft.detach(), verifier.detach(), rows, [("kl", 1.0)], with_overlap=True
    )
    assert found.overlap is not None
    torch.testing.assert_close(found.overlap, plain)
    return plain
