"""Three drafters that cost nothing, judged on the validation rows to put a figure in proportion.

* bigram, trigram: the most frequent follower in the training documents' answers, backing off to a
  shorter context and at last to the most frequent token; each draft extends the next one's context;
* prompt lookup: find the last earlier place with the same two tokens and copy what followed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from eagle3.data.tokens import TokenDocument
from eagle3.replay import answer_rows, replay

_MATCH = 2


@dataclass(frozen=True)
class Reference:
    """One cheap drafter's figures."""

    name: str
    accuracy: float
    """Right first drafts over rows that emit an answer token."""
    acceptance_replay: float
    """Tokens per verifier pass, as :func:`eagle3.replay.replay` walks."""


class CheapDrafter(Protocol):
    """Drafts from token ids alone."""

    def drafts(self, ids: Sequence[int], end: int, steps: int) -> list[int]:
        """Up to ``steps`` guesses for ``ids[end]`` and what follows; reads only ``ids[:end]``."""
        ...


class Ngram:
    """Follower tables of contexts up to ``order - 1`` tokens."""

    def __init__(self, documents: Iterable[TokenDocument], order: int) -> None:
        counts: list[defaultdict[tuple[int, ...], Counter[int]]] = [
            defaultdict(Counter) for _ in range(order)
        ]
        for document in documents:
            ids = document.input_ids
            for place in np.flatnonzero(document.loss_mask).tolist():
                for size in range(min(order, place + 1)):
                    counts[size][tuple(ids[place - size : place])][ids[place]] += 1
        self._best = [
            {context: followers.most_common(1)[0][0] for context, followers in table.items()}
            for table in counts
        ]

    def drafts(self, ids: Sequence[int], end: int, steps: int) -> list[int]:
        longest = len(self._best) - 1
        context = list(ids[max(end - longest, 0) : end])
        out: list[int] = []
        for _ in range(steps):
            token = self._follower(context)
            if token is None:
                break
            out.append(token)
            context.append(token)
        return out

    def _follower(self, context: list[int]) -> int | None:
        for size in range(min(len(self._best) - 1, len(context)), -1, -1):
            token = self._best[size].get(tuple(context[len(context) - size :]))
            if token is not None:
                return token
        return None


class PromptLookup:
    """Copies from the document itself."""

    def drafts(self, ids: Sequence[int], end: int, steps: int) -> list[int]:
        wanted = ids[end - _MATCH : end]
        for place in range(end - 1, _MATCH - 1, -1):
            if ids[place - 1] == wanted[-1] and ids[place - _MATCH : place] == wanted:
                return list(ids[place : min(place + steps, end)])
        return []


def compare_references(
    training: Sequence[TokenDocument], validation: Sequence[TokenDocument], draft_steps: int
) -> tuple[Reference, ...]:
    """Fit on ``training`` where there is something to fit, judge on ``validation``."""
    drafters: dict[str, CheapDrafter] = {}
    if training:
        drafters = {"bigram": Ngram(training, 2), "trigram": Ngram(training, 3)}
    drafters["prompt lookup"] = PromptLookup()
    return tuple(
        judge(name, drafter, validation, draft_steps) for name, drafter in drafters.items()
    )


def judge(
    name: str, drafter: CheapDrafter, documents: Iterable[TokenDocument], draft_steps: int
) -> Reference:
    """Accuracy and replay length of one drafter."""
    right = rows = emitted = rounds = 0
    for document in documents:
        walkable = answer_rows(np.asarray(document.loss_mask, dtype=bool))
        accepted = np.zeros(len(walkable), dtype=np.int64)
        for row in np.flatnonzero(walkable).tolist():
            accepted[row] = _leading(drafter, document.input_ids, row + 2, draft_steps)
        rows += int(walkable.sum())
        right += int((accepted > 0).sum())
        walked = replay(walkable, accepted)
        emitted, rounds = emitted + walked[0], rounds + walked[1]
    return Reference(name, right / max(rows, 1), emitted / max(rounds, 1))


def _leading(drafter: CheapDrafter, ids: Sequence[int], end: int, steps: int) -> int:
    """How many of the first drafts are the document's own tokens."""
    drafts = drafter.drafts(ids, end, steps)
    hits = [draft == token for draft, token in zip(drafts, ids[end : end + steps], strict=False)]
    return hits.index(False) if False in hits else len(hits)
