"""What speculative decoding needs of a verifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Pass:
    """What one pass over n tokens of B sequences gives."""

    logits: Float[Tensor, "B m W"]
    """Of the token after each of the n; after a prefill only of that after the prompt, m = 1."""
    aux_hidden: Float[Tensor, "B n KH"]
    """Concatenated aux states of the n tokens; of no width where none were asked for."""


class Session(Protocol):
    """A batch of sequences with their cache."""

    def forward(self, tokens: Int[Tensor, "B n"]) -> Pass:
        """Feed n tokens to each sequence; they stay only as far as :meth:`advance` says."""
        ...

    def advance(self, counts: Int[Tensor, " B"]) -> None:
        """Keep the first ``counts[b]`` tokens of the last pass."""
        ...

    def select(self, rows: Int[Tensor, " R"]) -> None:
        """Go on with these sequences only, in this order."""
        ...


class DecodingVerifier(Protocol):
    """A verifier with a cache that takes several tokens at a time."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        ...

    def begin(self, prompts: Sequence[Tensor], room: int) -> tuple[Session, Pass]:
        """Prefill.

        Args:
            prompts: int64 [n_b] each, n_b >= 1.
            room: tokens that follow at most, drafts included.

        Returns:
            The session, and a pass with ``logits`` [B, 1, W] and ``aux_hidden`` [B, longest, K*H],
            whose first n_b rows are those of prompt b.
        """
        ...
