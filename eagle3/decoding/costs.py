"""What a pass costs: the verifier's by the number of its tokens, and the drafter's."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from eagle3.decoding.choice import Greedy
from eagle3.decoding.clock import Clock
from eagle3.decoding.drafting import DraftSession
from eagle3.decoding.verifier import DecodingVerifier
from eagle3.errors import ConfigError
from eagle3.model.drafter import Drafter
from eagle3.names import DecodingPart


@dataclass(frozen=True)
class Costs:
    """Seconds, for one batch."""

    verifier_s: tuple[float, ...]
    """Of a pass over 1, 2, ... tokens of each sequence."""
    first_draft_s: float
    """Of the drafter's pass over what a round has accepted, up to its first draft."""
    next_draft_s: float
    """Of each further draft."""

    def __post_init__(self) -> None:
        figures = (*self.verifier_s, self.first_draft_s, self.next_draft_s)
        if not self.verifier_s or min(figures) < 0 or self.verifier_s[0] == 0:
            raise ConfigError(
                f"found {figures} seconds of passes, expected at least one of the verifier, above 0"
            )

    def round_s(self, draft_tokens: int) -> float:
        """Of a round with so many drafts; 0: a pass without drafting."""
        if draft_tokens == 0:
            return self.verifier_s[0]
        drafting = self.first_draft_s + (draft_tokens - 1) * self.next_draft_s
        return self.verifier_s[draft_tokens] + drafting

    @property
    def most_draft_tokens(self) -> int:
        """For which the verifier's cost is known."""
        return len(self.verifier_s) - 1


def measure_costs(
    verifier: DecodingVerifier,
    drafter: Drafter,
    contexts: Sequence[Tensor],
    draft_tokens: int,
    repeats: int,
) -> list[Costs]:
    """Time every kind of pass by turns, ``repeats`` times after one that does not count.

    Args:
        contexts: token ids before the pass, int64 [n] each: one batch of typical sequences.
        draft_tokens: the most drafts of a round.
    """
    trial = _Trial(verifier, drafter, contexts, draft_tokens + 1)
    rounds = [trial.run() for _ in range(repeats + 1)][1:]
    return [Costs(tuple(verifier_s), *drafter_s) for verifier_s, drafter_s in rounds]


def typical(costs: Sequence[Costs]) -> Costs:
    """The median of each figure."""
    passes = zip(*(each.verifier_s for each in costs), strict=True)
    return Costs(
        tuple(statistics.median(seconds) for seconds in passes),
        statistics.median(each.first_draft_s for each in costs),
        statistics.median(each.next_draft_s for each in costs),
    )


class _Trial:
    """One batch, on which the same passes can be made again and again."""

    def __init__(
        self, verifier: DecodingVerifier, drafter: Drafter, contexts: Sequence[Tensor], most: int
    ) -> None:
        self._most = most
        self._session, found = verifier.begin(contexts, most)
        self._device = found.logits.device
        self._lengths = torch.tensor([len(context) for context in contexts])
        self._tokens = torch.stack([context[-1:].repeat(most) for context in contexts])
        self._ids = drafter.d2t.cpu() + torch.arange(len(drafter.d2t))
        self._drafter, self._contexts, self._aux = drafter, contexts, found.aux_hidden

    def run(self) -> tuple[list[float], tuple[float, float]]:
        """Seconds of the verifier's passes over 1, 2, ... tokens, and of first and next draft."""
        passes = [self._timed(partial(self._verify, count)) for count in range(1, self._most + 1)]
        drafts = self._drafts()
        first = self._timed(partial(self._first_draft, drafts))
        return passes, (first, self._timed(partial(self._next_draft, drafts)))

    def _timed(self, run: Callable[[], object]) -> float:
        clock = Clock(self._device)
        with clock.part(DecodingPart.verifier):
            run()
        return clock.total

    def _verify(self, count: int) -> None:
        found = self._session.forward(self._tokens[:, :count])
        Greedy().judge(found.logits, self._tokens[:, 1:count], self._ids).following.cpu()

    def _drafts(self) -> DraftSession:
        rows, longest = len(self._contexts), int(self._lengths.max())
        drafts = DraftSession(self._drafter, rows, longest + 2 * self._most)
        prompts = nn.utils.rnn.pad_sequence(list(self._contexts), batch_first=True)
        drafts.extend(prompts, self._aux, self._lengths)
        return drafts

    def _first_draft(self, drafts: DraftSession) -> None:
        accepted = min(2, self._most)  # about what a round takes
        aux = self._aux[:, :1].repeat(1, accepted, 1)
        counts = torch.full_like(self._lengths, accepted)
        drafts.extend(self._tokens[:, :accepted], aux, counts)
        self._pick(drafts)

    def _next_draft(self, drafts: DraftSession) -> None:
        drafts.feed(self._tokens[:, 0])
        self._pick(drafts)

    def _pick(self, drafts: DraftSession) -> Tensor:
        return self._ids[Greedy().draft(drafts.logits()).cpu()]
