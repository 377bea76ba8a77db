"""The chunked half of :mod:`eagle3.ops.distillation.chain`, with gradients made in the forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from eagle3.ops import kernels
from eagle3.ops.distillation import closed_form
from eagle3.ops.distillation.rows import (
    ChainSteps,
    DraftHead,
    Mix,
    RowStatistics,
    StepStatistics,
    VerifierLogits,
)

CHUNK_BYTES = {"cpu": 16 << 20}
"""Draft logits of a chunk. On CPU more only spills the cache."""
_DEVICE_CHUNK_BYTES = 256 << 20
"""Elsewhere: thousands of rows, so that a card's matrix units are full."""


def chain(
    hidden: Sequence[Tensor],
    steps: ChainSteps,
    draft_head: DraftHead,
    verifier_logits: VerifierLogits,
    mix: Mix,
    weights: Tensor | None,
    with_overlap: bool,
) -> tuple[Tensor, list[StepStatistics]]:
    """See :func:`eagle3.ops.distillation.chain.chain_loss`."""
    wanted = weights is not None and torch.is_grad_enabled()
    judge = _Judge(hidden, steps, draft_head, mix, weights if wanted else None, with_overlap)
    with torch.no_grad():
        for chunk in judge.chunks():
            judge.add(chunk, verifier_logits(steps.verifier_rows[chunk.targets]))
    loss = judge.loss(weights)
    if wanted:
        inputs = (draft_head.norm_weight, draft_head.weight, *hidden)
        loss = _KnownGradients.apply(loss, judge.gradients(), *inputs)
    return loss, judge.statistics()


class _KnownGradients(torch.autograd.Function):
    """A loss whose gradients are there already; it can be differentiated once."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor | None], *inputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "the gradients of this loss were handed out before"
        scaled = [g if g is None else g.mul_(grad_loss.to(g.dtype)) for g in gradients]
        return (None, None, *scaled)


class _Chunk:
    """Consecutive target rows, and the rows of each step that read them."""

    def __init__(self, targets: slice, parts: list[slice]) -> None:
        self.targets, self.parts = targets, parts


class _Judge:
    """Collects statistics and gradients chunk by chunk."""

    def __init__(
        self,
        hidden: Sequence[Tensor],
        steps: ChainSteps,
        draft_head: DraftHead,
        mix: Mix,
        weights: Tensor | None,
        with_overlap: bool,
    ) -> None:
        """``weights`` None: no gradients."""
        self._hidden = [state.detach() for state in hidden]
        self._steps, self._head, self._mix = steps, draft_head, mix
        self._weights, self._with_overlap = weights, with_overlap
        self._dtype = _product_dtype(hidden[0])
        self._weight = draft_head.weight.detach().to(self._dtype)
        self._found: list[list[StepStatistics]] = [[] for _ in hidden]
        if weights is not None:
            sums = torch.promote_types(draft_head.weight.dtype, torch.float32)
            self._grad_hidden = [torch.zeros_like(state) for state in self._hidden]
            self._grad_norm = torch.zeros_like(draft_head.norm_weight, dtype=sums)
            trained = draft_head.weight.requires_grad
            self._grad_weight = torch.zeros_like(draft_head.weight, dtype=sums) if trained else None

    def chunks(self) -> Iterator[_Chunk]:
        """Chunks whose draft logits have about ``CHUNK_BYTES``; at least one, perhaps empty."""
        device, count = self._hidden[0].device, self._steps.verifier_rows.shape[0]
        budget = CHUNK_BYTES.get(device.type, _DEVICE_CHUNK_BYTES)
        row_bytes = self._weight.shape[0] * self._weight.element_size()
        size = max(budget // (row_bytes * len(self._hidden)), 1)
        edges = [*range(0, count, size), count] if count else [0, 0]
        at = torch.tensor(edges, device=device)
        bounds = torch.stack([torch.searchsorted(rows.targets, at) for rows in self._steps.rows])
        places = bounds.tolist()
        for number, (first, last) in enumerate(pairwise(edges)):
            parts = [slice(*place[number : number + 2]) for place in places]
            yield _Chunk(slice(first, last), parts)

    def add(self, chunk: _Chunk, verifier_logits: Tensor) -> None:
        """Judge one chunk."""
        steps = list(zip(self._steps.rows, chunk.parts, strict=True))
        columns = [rows.columns[part] for rows, part in steps]
        targets = torch.cat([rows.targets[part] for rows, part in steps]) - chunk.targets.start
        counts = [len(each) for each in columns]
        hidden = torch.cat([s[c] for s, c in zip(self._hidden, columns, strict=True)])
        with torch.enable_grad():
            hidden.requires_grad_(self._weights is not None)
            normed = self._head.norm(hidden)
        features = normed.detach().to(self._dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            logits = features @ self._weight.t()
            best = verifier_logits.argmax(-1)[targets]
            weights = self._row_weights(counts)
            found = _row_statistics(logits)(
                logits, verifier_logits, targets, self._mix,
                weights=weights, with_overlap=self._with_overlap,
            )  # fmt: skip
            self._keep(found, best, counts)
            if weights is not None:
                self._add_gradients(logits, features, (hidden, normed), columns)

    def loss(self, weights: Tensor | None) -> Tensor:
        """Weighted sum of the summed losses of all steps."""
        if weights is None:
            return self._hidden[0].new_zeros(())
        sums = torch.stack([step.losses.sum() for step in self.statistics()])
        return (weights.to(sums.dtype) * sums).sum()

    def statistics(self) -> list[StepStatistics]:
        """All rows of each step."""
        return [_joined(parts) for parts in self._found]

    def gradients(self) -> list[Tensor | None]:
        """Of the norm's gain, the head and the hidden states, for a loss of slope one."""
        head = self._head
        grad_weight = self._grad_weight
        return [
            self._grad_norm.to(head.norm_weight.dtype),
            None if grad_weight is None else grad_weight.to(head.weight.dtype),
            *self._grad_hidden,
        ]

    def _row_weights(self, counts: list[int]) -> Tensor | None:
        if self._weights is None:
            return None
        repeats = torch.tensor(counts, device=self._weights.device)
        return self._weights.repeat_interleave(repeats, output_size=sum(counts))

    def _add_gradients(
        self,
        grad_logits: Tensor,
        features: Tensor,
        normed: tuple[Tensor, Tensor],
        columns: list[Tensor],
    ) -> None:
        """Both products of the backward pass, and the norm's."""
        if self._grad_weight is not None:
            _add_product(self._grad_weight, grad_logits.t(), features)
        hidden, output = normed
        grad_output = (grad_logits @ self._weight).to(output.dtype)
        grads = torch.autograd.grad(output, (hidden, self._head.norm_weight), grad_output)
        self._grad_norm += grads[1]
        parts = grads[0].split([len(each) for each in columns])
        for grad, each, part in zip(self._grad_hidden, columns, parts, strict=True):
            grad.index_copy_(0, each, part)

    def _keep(self, found: RowStatistics, best: Tensor, counts: list[int]) -> None:
        overlaps = [None] * len(counts) if found.overlap is None else found.overlap.split(counts)
        split = zip(found.loss.split(counts), found.draft_best.split(counts), best.split(counts),
                    overlaps, strict=True)  # fmt: skip
        for kept, parts in zip(self._found, split, strict=True):
            kept.append(StepStatistics(*parts))


def _row_statistics(logits: Tensor) -> Callable[..., RowStatistics]:
    """One kernel a row where Triton runs, else plain PyTorch."""
    if not kernels.available(logits):
        return closed_form.row_statistics
    from eagle3.ops.distillation import triton_rows  # Triton is not imported without a need

    return triton_rows.row_statistics


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``, the sum in the dtype of ``total``."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _product_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    if hidden.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def _joined(parts: list[StepStatistics]) -> StepStatistics:
    overlaps = [part.overlap for part in parts if part.overlap is not None]
    return StepStatistics(
        torch.cat([part.losses for part in parts]),
        torch.cat([part.draft_best for part in parts]),
        torch.cat([part.verifier_best for part in parts]),
        torch.cat(overlaps) if overlaps else None,
    )
