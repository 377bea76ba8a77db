"""Conversations with the verifier's own answers, token by token as it wrote them.

The answers of a conversation are written one after another, each to what the template makes of the
messages before it::

    prompt 1 = template(user 1)                       -> answer 1
    prompt 2 = template(user 1, answer 1, user 2)     -> answer 2
    document = prompt 2 + answer 2, supervised: answer 2, and answer 1 where prompt 2 still begins
               with prompt 1 + answer 1

So nothing is rendered and tokenized again that the verifier wrote last, its reasoning stays, and an
earlier answer that a template rewrites is context only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from eagle3.capture_progress import Progress
from eagle3.capturing.batches import plan_batches
from eagle3.capturing.documents import Document, label
from eagle3.capturing.responses import Key, Responses
from eagle3.conversations.messages import ASSISTANT, Conversation
from eagle3.conversations.template import ChatTemplate
from eagle3.errors import DataError
from eagle3.names import Regenerate
from eagle3.verifier.base import Generator, Sampling


def wanted_answers(conversation: Conversation, which: Regenerate) -> tuple[int, ...]:
    """Places of the messages that the verifier writes; the place after the last message is the
    answer that a prompt waits for.

    With ``last`` and ``all``, messages after the last answer are left out where there is one.
    """
    waits = conversation.messages[-1]["role"] != ASSISTANT
    waiting = (len(conversation.messages),) if waits else ()
    match which:
        case Regenerate.off:
            return ()
        case Regenerate.missing:
            return waiting
        case Regenerate.last:
            return waiting or conversation.answers[-1:]
        case Regenerate.all:
            return (*conversation.answers, *waiting)


@dataclass(frozen=True)
class _Turn:
    """One answer that is to be written."""

    key: Key
    conversation: Conversation
    """The messages before it."""
    prompt: tuple[int, ...]


class Answering:
    """Writes the answers of many conversations, the first of all, then the second, and so on."""

    def __init__(
        self,
        template: ChatTemplate,
        generator: Callable[[], Generator],
        responses: Responses,
        sampling: Sampling,
        batch_tokens: int,
        log: Callable[[str], None],
    ) -> None:
        """``generator`` is called when the first answer is missing: it loads the model."""
        self._template, self._generator, self._responses = template, generator, responses
        self._sampling, self._batch_tokens, self._log = sampling, batch_tokens, log

    def documents(
        self, conversations: Sequence[tuple[int, Conversation, tuple[int, ...]]]
    ) -> dict[int, Document | DataError]:
        """A document per conversation, or why there is none.

        Args:
            conversations: Number, messages, and the places of the wanted answers, at least one.
        """
        states = {number: _State(given, wanted) for number, given, wanted in conversations}
        refused: dict[int, DataError] = {}
        for turn_number in range(max((len(s.wanted) for s in states.values()), default=0)):
            turns = []
            for number, state in states.items():
                if number not in refused and turn_number < len(state.wanted):
                    try:
                        turns.append(self._turn(number, state, state.wanted[turn_number]))
                    except DataError as error:
                        refused[number] = error
            self._write(turns)
            for turn in turns:
                answer = self._responses.found[turn.key]
                states[turn.key[0]].add(turn, answer, self._text(answer))
        return {n: refused.get(n) or state.document() for n, state in states.items()}

    def _turn(self, number: int, state: _State, place: int) -> _Turn:
        before = state.conversation.until(place)
        if not before.messages:
            raise DataError(
                f"{before.place or 'conversation'}: begins with a message of the assistant, "
                "expected one of a user or a system before it. Leave the first message out."
            )
        return _Turn((number, place), before, tuple(self._template.ids(before, ask=True)))

    def _write(self, turns: Sequence[_Turn]) -> None:
        """Batches are planned over all turns, so that what is written after a stop is the same."""
        missing = {turn.key for turn in turns if turn.key not in self._responses.found}
        if not missing:
            return
        progress = Progress(len(missing), self._log, "answers", "answers")
        room = self._sampling.max_new_tokens
        lengths = [len(turn.prompt) + room for turn in turns]
        for batch in plan_batches(lengths, self._batch_tokens):
            chosen = [turns[place] for place in batch]
            wanted = [turn.key for turn in chosen if turn.key in missing]
            if not wanted:
                continue
            sampling = replace(self._sampling, seed=_seed(self._sampling.seed, chosen[0].key))
            prompts = [torch.tensor(turn.prompt) for turn in chosen]
            answers = self._generator().generate(prompts, sampling)
            self._responses.add(
                (turn.key, tuple(answer.tolist()))
                for turn, answer in zip(chosen, answers, strict=True)
                if turn.key in missing
            )
            progress.add(len(wanted))

    def _text(self, answer: tuple[int, ...]) -> str:
        ended = bool(answer) and answer[-1] in self._template.end_ids
        return self._template.decode(list(answer[:-1] if ended else answer))


class _State:
    """A conversation whose answers are being written."""

    def __init__(self, conversation: Conversation, wanted: tuple[int, ...]) -> None:
        self.conversation, self.wanted = conversation, wanted
        self._written: list[tuple[_Turn, tuple[int, ...]]] = []

    def add(self, turn: _Turn, answer: tuple[int, ...], text: str) -> None:
        """Put an answer in the place of the old one."""
        self._written.append((turn, answer))
        after = self.conversation.messages[turn.key[1] + 1 :]
        answered = turn.conversation.with_answer(text)
        self.conversation = replace(answered, messages=(*answered.messages, *after))

    def document(self) -> Document:
        """The last prompt with its answer, and what of it the verifier wrote."""
        last, answer = self._written[-1]
        ids = (*last.prompt, *answer)
        spans = []
        for turn, own in self._written:
            start, stop = len(turn.prompt), len(turn.prompt) + len(own)
            if ids[:stop] == (*turn.prompt, *own) and own:
                spans.append((start, stop))
        given = last.conversation
        return Document(ids, tuple(spans), label(given.source), given.place)


def _seed(seed: int, key: Key) -> int:
    """Of a batch, by the first turn in it."""
    content = f"{seed}:{key[0]}:{key[1]}".encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "little")
