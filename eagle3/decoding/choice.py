"""Which token is drafted, and which drafts the verifier accepts: greedy, or by sampling.

Sampling keeps the verifier's distribution p exactly, whatever the drafter's q is (Leviathan et al.,
arXiv 2211.17192, and Chen et al., arXiv 2302.01318)::

    accept draft d ~ q        with probability  min(1, p(d) / q(d))
    else take a token from    max(p - q, 0), normalised

q is zero outside the draft vocabulary, so tokens there are reached by the second line alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle3.verifier.base import Sampling


@dataclass(frozen=True, eq=False)
class Verdict:
    """Of one pass over B sequences."""

    accepted: Int[Tensor, " B"]
    """Drafts taken, from the first on."""
    following: Int[Tensor, " B"]
    """The verifier's own token after them."""


class Choice(Protocol):
    """Chooses for B sequences."""

    def draft(self, logits: Float[Tensor, "B V"]) -> Int[Tensor, " B"]:
        """Draft ids."""
        ...

    def judge(
        self, logits: Float[Tensor, "B n W"], drafts: Int[Tensor, "B k"], ids: Int[Tensor, " V"]
    ) -> Verdict:
        """Accept or reject k = n - 1 drafts, in the verifier's ids; ``ids`` are all it can be."""
        ...

    def select(self, rows: Int[Tensor, " R"]) -> None:
        """Go on with these sequences only."""
        ...


class Greedy:
    """The best token always."""

    def draft(self, logits: Tensor) -> Tensor:
        """The drafter's best token."""
        return logits.argmax(-1)

    def judge(self, logits: Tensor, drafts: Tensor, ids: Tensor) -> Verdict:
        """A draft is right where it is the verifier's best token."""
        best = logits.argmax(-1)
        right = best[:, :-1] == drafts.to(best.device)
        accepted = right.long().cumprod(1).sum(1)
        return Verdict(accepted, best.gather(1, accepted[:, None])[:, 0])

    def select(self, rows: Tensor) -> None:
        """There is nothing to keep."""


class Sampled:
    """By chance, with a generator for each sequence, so that no result depends on its batch."""

    def __init__(self, sampling: Sampling, numbers: Sequence[int]) -> None:
        """``numbers``: of the sequences; with the seed they are all that chance depends on."""
        self._sampling = sampling
        self._chance = [
            torch.Generator().manual_seed(sampling.seed * 1_000_003 + number) for number in numbers
        ]
        self._drafted: list[Tensor] = []

    def draft(self, logits: Tensor) -> Tensor:
        """A token from q, the drafter's distribution at the same temperature."""
        q = (logits.double() / self._sampling.temperature).softmax(-1)
        self._drafted.append(q)
        return pick(q, self._uniform(1).to(q.device)[:, 0])

    def judge(self, logits: Tensor, drafts: Tensor, ids: Tensor) -> Verdict:
        """Rejection sampling over the drafts since the last verdict."""
        p = processed(logits, self._sampling)
        drafted, self._drafted = self._drafted, []
        chance = self._uniform(len(drafted) + 1).to(p.device)
        q = torch.zeros_like(p)  # the last position has no draft, so there the rest of p is p
        for place, found in enumerate(drafted):
            q[:, place].index_copy_(1, ids.to(p.device), found.to(p.device))
        taken = accepts(p, q, drafts.to(p.device), chance[:, :-1])
        accepted = taken.long().cumprod(1).sum(1)
        rows = torch.arange(len(p), device=p.device)
        rest = remainder(p[rows, accepted], q[rows, accepted])
        return Verdict(accepted, pick(rest, chance[:, -1]))

    def select(self, rows: Tensor) -> None:
        """Keep their generators; called between a verdict and the next draft."""
        self._chance = [self._chance[row] for row in rows.tolist()]

    def _uniform(self, count: int) -> Tensor:
        """float64 [B, count] in [0, 1)."""
        draws = [
            torch.rand(count, dtype=torch.float64, generator=chance) for chance in self._chance
        ]
        return torch.stack(draws)


def choose(sampling: Sampling, numbers: Sequence[int]) -> Choice:
    """Greedy at temperature 0."""
    return Greedy() if sampling.temperature == 0 else Sampled(sampling, numbers)


def processed(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits [..., W] -> float64 probabilities after temperature, top-k and top-p, in that order
    (as servers and transformers apply them)."""
    scaled = logits.double() / sampling.temperature
    if 0 < sampling.top_k < scaled.shape[-1]:
        least = scaled.topk(sampling.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    p = scaled.softmax(-1)
    if sampling.top_p < 1:
        ordered, place = p.sort(-1, descending=True)
        # a token stays while those before it have less than top_p, so the best always does
        beyond = ordered.cumsum(-1) - ordered >= sampling.top_p
        p = p.masked_fill(torch.zeros_like(beyond).scatter(-1, place, beyond), 0.0)
        p = p / p.sum(-1, keepdim=True)
    return p


def accepts(p: Tensor, q: Tensor, drafts: Tensor, chance: Tensor) -> Tensor:
    """Which drafts pass by themselves: bool [B, k].

    Args:
        p, q: [B, n, W], n > k.
        drafts: int64 [B, k].
        chance: [B, k] in [0, 1).
    """
    count = drafts.shape[1]
    wanted = p[:, :count].gather(-1, drafts[..., None])[..., 0]
    offered = q[:, :count].gather(-1, drafts[..., None])[..., 0]
    return chance * offered < wanted


def remainder(p: Tensor, q: Tensor) -> Tensor:
    """``max(p - q, 0)`` normalised, [..., W]; p itself where nothing is left of it by rounding."""
    rest = (p - q).clamp(min=0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total.clamp(min=torch.finfo(p.dtype).tiny), p)


def pick(p: Tensor, chance: Tensor) -> Tensor:
    """The token at which the cumulated probability passes ``chance``, int64 [B].

    Args:
        p: [B, W].
        chance: [B] in [0, 1).
    """
    cumulated = p.cumsum(-1)
    # the sum may miss 1 by rounding, and a token of probability 0 is never taken
    limit = chance[:, None] * cumulated[:, -1:]
    return (cumulated > limit).long().argmax(-1)
