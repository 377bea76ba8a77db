"""Decode prompts with a chain of drafts: the verifier's own answers, in fewer passes.

One round of a sequence whose next token x_n is known and not yet fed::

    drafter    x_n -> d1 -> d2 -> d3
    verifier   x_n    d1    d2    d3        one pass, four predictions
    accepted          d1    d2    -         then the verifier's own token: three tokens in one pass

The first token of an answer comes from the prefill and counts in no round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eagle3.decoding.choice import Choice, Verdict, choose
from eagle3.decoding.clock import Clock
from eagle3.decoding.drafting import DraftSession
from eagle3.decoding.verifier import DecodingVerifier, Pass, Session
from eagle3.model.drafter import Drafter
from eagle3.names import DecodingPart
from eagle3.verifier.base import Sampling


@dataclass(frozen=True, eq=False)
class Drafting:
    """Who drafts, and how far ahead."""

    drafter: Drafter
    draft_tokens: int
    """Drafts of a round, at least 1; servers call it num_speculative_tokens."""


@dataclass(frozen=True)
class Answer:
    """What the verifier answers to one prompt."""

    ids: tuple[int, ...]
    """New tokens, with the one that ends the answer where it came in time."""
    rounds: int
    """Passes of the verifier after the prefill."""
    accepted: tuple[int, ...]
    """Rounds that took draft 1, 2, ...; drafts behind the end of the answer do not count."""

    @property
    def emitted(self) -> int:
        """Tokens that came from rounds."""
        return len(self.ids) - 1


def decode(
    verifier: DecodingVerifier,
    prompts: Sequence[Tensor],
    sampling: Sampling,
    clock: Clock,
    drafting: Drafting | None = None,
    *,
    numbers: Sequence[int] | None = None,
) -> list[Answer]:
    """Answers to a batch of prompts.

    With ``drafting`` they are what they are without: the same tokens where ``sampling`` is greedy,
    from the same distribution where it is not.

    Args:
        prompts: int64 [n] each, n >= 1.
        clock: takes the time of each part.
        drafting: None: one token a pass.
        numbers: of the prompts, for sampling; counted from 0 where not given.

    Raises:
        VerifierError: see :meth:`DecodingVerifier.begin`.
    """
    count = 0 if drafting is None else drafting.draft_tokens
    room = sampling.max_new_tokens + count
    numbers = range(len(prompts)) if numbers is None else numbers
    choice = choose(sampling, numbers)
    with clock.part(DecodingPart.prefill):
        session, found = verifier.begin(prompts, room)
    with clock.part(DecodingPart.choice):
        none = torch.zeros(len(prompts), 0, dtype=torch.int64)
        first = choice.judge(found.logits, none, none[0]).following.cpu()
    writing = [_Writing(int(token)) for token in first]
    drafts = None
    if drafting is not None:
        with clock.part(DecodingPart.prefill):
            drafts = _begin_drafting(drafting, prompts, first, found, room)
    rounds = _Rounds(session, choice, clock, drafts, count)
    rounds.run(writing, frozenset(verifier.end_ids), sampling.max_new_tokens)
    return [each.answer(count) for each in writing]


def decode_all(
    verifier: DecodingVerifier,
    prompts: Sequence[Tensor],
    sampling: Sampling,
    clock: Clock,
    drafting: Drafting | None = None,
    *,
    batch_size: int,
    finished: Callable[[int], None] = lambda _: None,
) -> list[Answer]:
    """:func:`decode` in batches of prompts of like length; answers in the order of the prompts.

    Args:
        finished: told the new tokens of every batch.
    """
    order = sorted(range(len(prompts)), key=lambda number: (len(prompts[number]), number))
    answers: dict[int, Answer] = {}
    for first in range(0, len(order), batch_size):
        batch = order[first : first + batch_size]
        found = decode(
            verifier, [prompts[n] for n in batch], sampling, clock, drafting, numbers=batch
        )
        answers.update(zip(batch, found, strict=True))
        finished(sum(len(answer.ids) for answer in found))
    return [answers[number] for number in range(len(prompts))]


@dataclass
class _Writing:
    """An answer that grows."""

    last: int
    ids: list[int] = field(default_factory=list)
    rounds: int = 0
    lengths: list[int] = field(default_factory=list)
    """Accepted drafts of each round, as far as the answer goes."""

    def __post_init__(self) -> None:
        self.ids = [self.last]

    def add(self, tokens: Sequence[int], ends: frozenset[int], limit: int) -> None:
        """A round's tokens: accepted drafts and one more. What is behind the end is dropped."""
        room = limit - len(self.ids)
        kept = next((n for n, token in enumerate(tokens[:room], 1) if token in ends), room)
        self.ids += tokens[:kept]
        self.rounds += 1
        self.lengths.append(min(len(tokens) - 1, kept))

    def done(self, ends: frozenset[int], limit: int) -> bool:
        return self.ids[-1] in ends or len(self.ids) >= limit

    def answer(self, draft_tokens: int) -> Answer:
        reached = range(1, draft_tokens + 1)
        accepted = tuple(sum(length >= place for length in self.lengths) for place in reached)
        return Answer(tuple(self.ids), self.rounds, accepted)


def _begin_drafting(
    drafting: Drafting, prompts: Sequence[Tensor], first: Tensor, found: Pass, room: int
) -> _Drafts:
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    drafter = drafting.drafter
    session = DraftSession(drafter, len(prompts), int(lengths.max()) + room)
    tokens = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt) - 1] = prompt[1:]
        tokens[row, len(prompt) - 1] = first[row]
    session.extend(tokens, found.aux_hidden, lengths)
    ids = drafter.d2t.cpu() + torch.arange(len(drafter.d2t))
    return _Drafts(session, ids)


@dataclass(frozen=True, eq=False)
class _Drafts:
    session: DraftSession
    ids: Tensor
    """Verifier id of each draft id."""

    def chain(self, count: int, choice: Choice) -> Tensor:
        """Drafts of a round in the verifier's ids, int64 [B, count]."""
        drafts: list[Tensor] = []
        while True:
            drafts.append(self.ids[choice.draft(self.session.logits()).cpu()])
            if len(drafts) == count:
                return torch.stack(drafts, dim=1)
            self.session.feed(drafts[-1])


@dataclass(frozen=True, eq=False)
class _Rounds:
    """The rounds of one batch, which shrinks as answers end."""

    session: Session
    choice: Choice
    clock: Clock
    drafts: _Drafts | None
    count: int

    def run(self, writing: Sequence[_Writing], ends: frozenset[int], limit: int) -> None:
        """Until every answer has ended."""
        last = torch.tensor([each.ids[-1] for each in writing])
        active = list(writing)
        keep = [row for row, each in enumerate(active) if not each.done(ends, limit)]
        while keep:
            if len(keep) < len(active):
                active, last = [active[row] for row in keep], last[keep]
                self._select(torch.tensor(keep))
            drafts = self._chain(len(active))
            with self.clock.part(DecodingPart.verifier):
                found = self.session.forward(torch.cat((last[:, None], drafts), dim=1))
            verdict = self._judge(found, drafts)
            last = verdict.following
            for row, each in enumerate(active):
                taken = drafts[row, : int(verdict.accepted[row])].tolist()
                each.add([*taken, int(last[row])], ends, limit)
            keep = [row for row, each in enumerate(active) if not each.done(ends, limit)]
            if self.drafts is not None and keep:
                with self.clock.part(DecodingPart.drafter):
                    self._extend(self.drafts.session, found, drafts, verdict)

    def _chain(self, rows: int) -> Tensor:
        if self.drafts is None:
            return torch.zeros(rows, 0, dtype=torch.int64)
        with self.clock.part(DecodingPart.drafter):
            return self.drafts.chain(self.count, self.choice)

    def _judge(self, found: Pass, drafts: Tensor) -> Verdict:
        ids = drafts[0] if self.drafts is None else self.drafts.ids
        with self.clock.part(DecodingPart.choice):
            verdict = self.choice.judge(found.logits, drafts, ids)
            on_host = Verdict(verdict.accepted.cpu(), verdict.following.cpu())
        self.session.advance(on_host.accepted + 1)
        return on_host

    def _extend(self, session: DraftSession, found: Pass, drafts: Tensor, verdict: Verdict) -> None:
        """Real rows for what was accepted: their tokens with the verifier's states before them."""
        tokens = torch.cat((drafts, torch.zeros_like(drafts[:, :1])), dim=1)
        tokens.scatter_(1, verdict.accepted[:, None], verdict.following[:, None])
        session.extend(tokens, found.aux_hidden, verdict.accepted + 1)

    def _select(self, rows: Tensor) -> None:
        self.session.select(rows)
        self.choice.select(rows)
        if self.drafts is not None:
            self.drafts.session.select(rows)
