"""What drafting is worth: from acceptance and the cost of passes to tokens per second.

A round with K drafts gives on average 1 + a_1 + ... + a_K tokens, where a_k is the share of rounds
that accept draft k, and costs V(K + 1) + D(K): the verifier's pass over K + 1 tokens and the
drafter's K drafts. Without drafting a token costs V(1), so (Leviathan et al., arXiv 2211.17192,
theorem 3.8, with measured costs in place of one ratio)::

    speedup(K)     = (1 + a_1 + ... + a_K) * V(1) / (V(K + 1) + D(K))
    break-even(K)  = (V(K + 1) + D(K)) / V(1)       tokens a round, below which drafting loses
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from eagle3.decoding.costs import Costs
from eagle3.errors import ConfigError

_BISECTIONS = 60


@dataclass(frozen=True)
class SpeedRow:
    """Prediction for one number of drafts."""

    draft_tokens: int
    acceptance_length: float
    """Tokens of a round."""
    round_s: float
    tokens_per_s: float
    """Of all sequences of the batch."""
    speedup: float
    break_even: float
    """Acceptance length at which drafting is as fast as not drafting."""
    break_even_rate: float | None
    """The same as a rate: each draft accepted so often, given those before it; None: even a
    drafter that is always right would lose."""


def lengths_of(accepted: Sequence[float]) -> list[float]:
    """Acceptance length with 1, 2, ... drafts, from the share of rounds that accept each.

    Raises:
        ConfigError: shares that grow, or are not within 0 and 1.
    """
    falling = all(a >= b for a, b in pairwise(accepted))
    if not falling or not all(0 <= share <= 1 for share in accepted):
        raise ConfigError(
            f"acceptance by position: found {list(accepted)}, expected shares of rounds between 0 "
            "and 1 that do not grow, since draft 2 counts only where draft 1 was right"
        )
    return [1.0 + total for total in accumulate(accepted)]


def speed_table(lengths: Sequence[float], costs: Costs, batch_size: int = 1) -> list[SpeedRow]:
    """A row for 1, 2, ... drafts, as far as acceptance and costs are known.

    Args:
        lengths: acceptance length with 1, 2, ... drafts.
        batch_size: sequences that share a pass.
    """
    rows = []
    for draft_tokens, length in enumerate(lengths[: costs.most_draft_tokens], 1):
        round_s = costs.round_s(draft_tokens)
        break_even = round_s / costs.round_s(0)
        rows.append(
            SpeedRow(
                draft_tokens=draft_tokens,
                acceptance_length=length,
                round_s=round_s,
                tokens_per_s=batch_size * length / round_s,
                speedup=length / break_even,
                break_even=break_even,
                break_even_rate=_rate(break_even, draft_tokens),
            )
        )
    return rows


def best(rows: Sequence[SpeedRow]) -> SpeedRow:
    """The fastest; of equal ones that with fewer drafts."""
    return max(rows, key=lambda row: (row.speedup, -row.draft_tokens))


def _rate(length: float, draft_tokens: int) -> float | None:
    """The rate r with 1 + r + ... + r^K equal to ``length``."""
    if length > draft_tokens + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        reached = sum(middle**power for power in range(draft_tokens + 1))
        low, high = (middle, high) if reached < length else (low, middle)
    return high
