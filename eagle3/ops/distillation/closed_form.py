"""Row statistics and in-place gradients of all losses in plain PyTorch, without autograd.

With g_v = d loss / d log q_v, taking each log q_v as free, the gradient of a draft logit is
``g_v - q_v sum(g)``. For the losses of :mod:`eagle3.ops.distillation.reference`::

    kl           q - p
    ce           q - onehot(argmax p)
    reverse_kl   q (log q - log p - loss)
    js           q (log(q/m) - KL(q||m)) / 2                   m = (p + q) / 2
    tv           g = q sign(q - p) / 2
    nla          g = -min(p, q) / sum min(p, q) where q < p    half of it where q = p
    lk_hybrid    a kl + (1 - a) tv with constant a = exp(-3 sum min(p, q))

Rows are done in blocks small enough for the processor's cache, so nothing as large as the logits
is made beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle3.ops.distillation.rows import Mix, RowStatistics

_BLOCK_BYTES = 1 << 20
"""One [block, V] temporary; a few of them are alive at a time."""


@torch.no_grad()
def row_statistics(
    draft_logits: Float[Tensor, "R V"],
    verifier_logits: Float[Tensor, "C V"],
    targets: Int[Tensor, " R"],
    mix: Mix,
    *,
    weights: Float[Tensor, " R"] | None = None,
    with_overlap: bool = False,
) -> RowStatistics:
    """Loss, best token and overlap of each row; with ``weights`` the gradient replaces the logits.

    Args:
        draft_logits: overwritten by ``weights[r] * d loss_r / d draft_logits_r`` where ``weights``
            are given.
        verifier_logits: -inf excludes an id.
        targets: row of ``verifier_logits`` for each draft row.
        mix: checked (name, weight) pairs; terms of weight 0 cost nothing.
        weights: factor of each row's loss in what is differentiated; None: statistics only.
        with_overlap: also sum_v min(p_v, q_v).
    """
    dtype = torch.promote_types(draft_logits.dtype, torch.float32)
    rows, width = draft_logits.shape
    loss = draft_logits.new_zeros(rows, dtype=dtype)
    best = targets.new_empty(rows)
    overlap = torch.empty_like(loss) if with_overlap else None
    terms = [(name, weight) for name, weight in mix if weight > 0]
    step = max(_BLOCK_BYTES // (max(width, 1) * dtype.itemsize), 1)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        block = _Block(draft_logits[part], verifier_logits[targets[part]], dtype)
        best[part] = block.draft_best
        if overlap is not None:
            overlap[part] = block.overlap
        gradient = _mixed(block, terms, loss[part], weights is not None)
        if weights is not None and gradient is not None:
            draft_logits[part] = gradient.mul_(weights[part, None])
        del block, gradient  # before the next block is made
    return RowStatistics(loss, best, overlap)


def _mixed(block: _Block, terms: Mix, loss: Tensor, with_gradient: bool) -> Tensor | None:
    """Add the weighted terms to ``loss``; the gradient of their sum [block, V]."""
    gradient = None
    for name, weight in terms:
        term_loss, term_gradient = TERMS[name](block)
        loss.add_(term_loss, alpha=weight)
        if with_gradient:
            scaled = term_gradient().mul_(weight)
            gradient = scaled if gradient is None else gradient.add_(scaled)
    return gradient


class _Block:
    """Both distributions of some rows; each quantity is made once, when first asked for."""

    def __init__(self, draft_logits: Tensor, verifier_logits: Tensor, dtype: torch.dtype) -> None:
        self._draft, self._verifier = draft_logits, verifier_logits
        self._dtype = dtype

    @cached_property
    def draft_best(self) -> Tensor:
        return self._draft.argmax(-1)

    @cached_property
    def verifier_best(self) -> Tensor:
        return self._verifier.argmax(-1)

    @cached_property
    def log_q(self) -> Tensor:
        return torch.log_softmax(self._draft, dim=-1, dtype=self._dtype)

    @cached_property
    def log_p(self) -> Tensor:
        # finite where p = 0, with room to subtract another log-probability
        log_p = torch.log_softmax(self._verifier, dim=-1, dtype=self._dtype)
        return log_p.clamp_(min=torch.finfo(self._dtype).min / 2)

    @cached_property
    def q(self) -> Tensor:
        return self.log_q.exp()

    @cached_property
    def p(self) -> Tensor:
        return self.log_p.exp()

    @cached_property
    def overlap(self) -> Tensor:
        return torch.minimum(self.p, self.q).sum(-1)

    @cached_property
    def entropy(self) -> Tensor:
        """sum p log p"""
        return _dot(self.p, self.log_p)


Term = tuple[Tensor, Callable[[], Tensor]]
"""The loss [block], and what makes its gradient [block, V], a tensor of its own."""


def _kl(block: _Block) -> Term:
    loss = block.entropy - _dot(block.p, block.log_q)
    return loss, lambda: block.q - block.p


def _ce(block: _Block) -> Term:
    best = block.verifier_best[:, None]
    loss = -block.log_q.gather(-1, best)[:, 0]
    return loss, lambda: block.q.scatter_add(-1, best, -torch.ones_like(block.q[:, :1]))


def _reverse_kl(block: _Block) -> Term:
    ratio = block.log_q - block.log_p
    loss = _dot(block.q, ratio)
    return loss, lambda: ratio.sub_(loss[:, None]).mul_(block.q)


def _js(block: _Block) -> Term:
    log_m = torch.logaddexp(block.log_p, block.log_q).sub_(math.log(2))
    to_p = block.entropy - _dot(block.p, log_m)
    ratio = log_m.neg_().add_(block.log_q)
    to_q = _dot(block.q, ratio)
    return (to_p + to_q) / 2, lambda: ratio.sub_(to_q[:, None]).mul_(block.q).div_(2)


def _tv(block: _Block) -> Term:
    above = block.q - block.p
    loss = above.abs().sum(-1) / 2

    def gradient() -> Tensor:
        free = above.sign_().mul_(block.q).div_(2)
        return _on_logits(free, block.q)

    return loss, gradient


def _nla(block: _Block) -> Term:
    log_min = torch.minimum(block.log_p, block.log_q)
    log_sum = torch.logsumexp(log_min, dim=-1)

    def gradient() -> Tensor:
        share = log_min.sub_(log_sum[:, None]).exp_()
        # -1 where q < p, 0 where q > p, and between them at a tie, as torch.minimum has it
        side = torch.sign(block.log_q - block.log_p).sub_(1).div_(2)
        return _on_logits(share.mul_(side), block.q)

    return -log_sum, gradient


def _lk_hybrid(block: _Block) -> Term:
    share = torch.exp(-3 * block.overlap)
    kl, kl_gradient = _kl(block)
    tv, tv_gradient = _tv(block)

    def gradient() -> Tensor:
        return kl_gradient().mul_(share[:, None]).add_(tv_gradient().mul_(1 - share[:, None]))

    return share * kl + (1 - share) * tv, gradient


TERMS: dict[str, Callable[[_Block], Term]] = {
    "kl": _kl,
    "reverse_kl": _reverse_kl,
    "js": _js,
    "ce": _ce,
    "tv": _tv,
    "nla": _nla,
    "lk_hybrid": _lk_hybrid,
}


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Row by row sum of products, without the products."""
    return torch.linalg.vecdot(a, b)


def _on_logits(free: Tensor, q: Tensor) -> Tensor:
    """Gradient of the logits from that of the log-probabilities, in place."""
    return free.addcmul_(q, free.sum(-1, keepdim=True), value=-1)
