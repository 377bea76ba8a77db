"""Divergences between verifier and drafter distributions, one value a row, in plain PyTorch.

p = softmax(verifier logits), held constant; q = softmax(draft logits); sums over the draft
vocabulary. Everything is computed from log-probabilities, in float32 at least, so that saturated
rows stay finite, and a verifier logit of -inf counts as p = 0 with 0 log 0 = 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor


class Distributions:
    """Both distributions of the rows; each quantity is computed once, when a term first asks."""

    def __init__(self, draft_logits: Tensor, verifier_logits: Tensor) -> None:
        dtype = torch.promote_types(draft_logits.dtype, verifier_logits.dtype)
        self._dtype = torch.promote_types(dtype, torch.float32)
        self._draft_logits = draft_logits
        self._verifier_logits = verifier_logits.detach()

    @cached_property
    def log_q(self) -> Tensor:
        """[R, V] log q, with graph."""
        return torch.log_softmax(self._draft_logits, dim=-1, dtype=self._dtype)

    @cached_property
    def log_p(self) -> Tensor:
        """[R, V] log p, constant; finite also where p = 0, so that p log p is 0 there."""
        log_p = torch.log_softmax(self._verifier_logits, dim=-1, dtype=self._dtype)
        # Half the range leaves room to subtract another log-probability.
        return log_p.clamp_(min=torch.finfo(self._dtype).min / 2)

    @cached_property
    def q(self) -> Tensor:
        """[R, V] q, with graph."""
        return self.log_q.exp()

    @cached_property
    def p(self) -> Tensor:
        """[R, V] p, constant."""
        return self.log_p.exp()

    @cached_property
    def verifier_argmax(self) -> Tensor:
        """[R] int64 draft id of the verifier's best token."""
        return self._verifier_logits.argmax(dim=-1)

    @cached_property
    def overlap(self) -> Tensor:
        """[R] sum of min(p, q), the chance that sampled drafts are accepted; without gradient."""
        # detach, not no_grad: q made here may be the q that another term differentiates.
        return torch.minimum(self.p, self.q.detach()).sum(-1)


def kl(rows: Distributions) -> Tensor:
    """KL(p || q) = sum p (log p - log q)."""
    # This order of the difference spares backward a negation of [R, V].
    return -(rows.p * (rows.log_q - rows.log_p)).sum(-1)


def reverse_kl(rows: Distributions) -> Tensor:
    """KL(q || p) = sum q (log q - log p).

    Infinite in theory, huge here, where the verifier excludes a token that the drafter does not.
    """
    return (rows.q * (rows.log_q - rows.log_p)).sum(-1)


def js(rows: Distributions) -> Tensor:
    """Jensen-Shannon divergence: (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2."""
    log_m = torch.logaddexp(rows.log_p, rows.log_q) - math.log(2)
    to_p = (rows.p * (rows.log_p - log_m)).sum(-1)
    to_q = (rows.q * (rows.log_q - log_m)).sum(-1)
    return (to_p + to_q) / 2


def ce(rows: Distributions) -> Tensor:
    """Cross-entropy on the verifier's best token: -log q[argmax p]."""
    return -rows.log_q.gather(-1, rows.verifier_argmax[:, None]).squeeze(-1)


def tv(rows: Distributions) -> Tensor:
    """Total variation: sum |p - q| / 2 = 1 - sum min(p, q)."""
    return (rows.p - rows.q).abs().sum(-1) / 2


def nla(rows: Distributions) -> Tensor:
    """Negative log acceptance: -log sum min(p, q), finite however small the overlap is."""
    return -torch.logsumexp(torch.minimum(rows.log_p, rows.log_q), dim=-1)


def lk_hybrid(rows: Distributions) -> Tensor:
    """a KL(p || q) + (1 - a) TV with constant a = exp(-3 sum min(p, q)) (arXiv 2602.23881).

    KL leads while the distributions hardly overlap, total variation once they do.
    """
    weight = torch.exp(-3 * rows.overlap)
    return weight * kl(rows) + (1 - weight) * tv(rows)


DIVERGENCES: dict[str, Callable[[Distributions], Tensor]] = {
    "kl": kl,
    "reverse_kl": reverse_kl,
    "js": js,
    "ce": ce,
    "tv": tv,
    "nla": nla,
    "lk_hybrid": lk_hybrid,
}


def mixed_loss(
    draft_logits: Tensor, verifier_logits: Tensor, mix: Sequence[tuple[str, float]]
) -> Tensor:
    """Weighted sum of divergences, [R]; terms share softmaxes, terms of weight 0 cost nothing."""
    rows = Distributions(draft_logits, verifier_logits)
    terms = [weight * DIVERGENCES[name](rows) for name, weight in mix if weight > 0]
    return torch.stack(terms).sum(0) if len(terms) > 1 else terms[0]
