"""Which tokens of a conversation the verifier wrote.

A loss mask of ones where they are, from the template's own marks where it has them, else from
rendering the conversation turn by turn::

    messages          system  user   assistant        user   assistant
    before answer 2   |<------- asked for the answer ------>|
    after answer 2    |<------------------------------------ with it --->|
    whole             |<------------------------------------------------>|
    mask              0 0 0 0 0 0 0 0 1 1 1 1 1 E 0 0 0 0 0 0 1 1 1 1 E 0     E: end of turn

The tokens before an answer must be the beginning of the whole, to the last id: that is what a
server has in its cache when it generates. So no text is searched, and nothing is guessed about
roles or markers. An answer ends with its end-of-sequence token; what the template writes after it
(a line break) the verifier never writes, and is not supervised.

Some templates rewrite earlier answers, most often to drop their reasoning. Such an answer is no
longer what the verifier wrote after those tokens: it stays as context and is not supervised. Where
the last answer cannot be placed, the conversation is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle3.conversations.messages import Conversation
from eagle3.conversations.template import ChatTemplate
from eagle3.errors import DataError

Span = tuple[int, int]


@dataclass(frozen=True)
class MaskedTokens:
    """Token ids of a conversation and what of it is supervised."""

    ids: tuple[int, ...]
    spans: tuple[Span, ...]
    """Bounds ``[start, stop)`` of the supervised answers, ascending, at least one."""
    num_rewritten: int = 0
    """Answers that the template changed after the fact; they are context only."""

    @property
    def loss_mask(self) -> tuple[int, ...]:
        """1 on supervised tokens."""
        mask = [0] * len(self.ids)
        for start, stop in self.spans:
            mask[start:stop] = [1] * (stop - start)
        return tuple(mask)


def masked_tokens(template: ChatTemplate, conversation: Conversation) -> MaskedTokens:
    """Ids and mask of a conversation that has its answers.

    Messages after the last answer are left out, since no loss reads them.

    Raises:
        DataError: no answer, or the template does not let the last answer be placed; with reason.
    """
    conversation = conversation.up_to_last_answer()
    if not conversation.messages:
        raise DataError(
            f"{conversation.place or 'conversation'}: found no message of the assistant, expected "
            "one. Let the verifier write it (capture.regenerate), or leave the conversation out."
        )
    if conversation.answers[0] == 0:
        raise DataError(
            f"{conversation.place or 'conversation'}: begins with a message of the assistant, "
            "expected one of a user or a system before it. Leave the first message out."
        )
    whole = template.ids(conversation)
    find = _marked_spans if template.marks_answers else _rendered_spans
    spans = find(template, conversation, whole)
    answers = [conversation.messages[place] for place in conversation.answers]
    found = []
    for answer, span in zip(answers, spans, strict=True):
        if span is None:
            continue
        start, stop = span
        _check_text(template, conversation, str(answer["content"]), whole[start:stop])
        found.append(span)
    return MaskedTokens(tuple(whole), tuple(found), len(spans) - len(found))


def _rendered_spans(
    template: ChatTemplate, conversation: Conversation, whole: Sequence[int]
) -> list[Span | None]:
    """Bounds of every answer by incremental rendering; None: rewritten by the template."""
    spans: list[Span | None] = []
    last = conversation.answers[-1]
    for place in conversation.answers:
        before = template.ids(conversation.until(place), ask=True)
        after = whole if place == last else template.ids(conversation.until(place + 1))
        start, stop = len(before), len(after)
        if _begins(whole, before) and _begins(whole, after) and start < stop:
            spans.append((start, _end_of_answer(template, whole, start, stop)))
        elif place == last:
            raise _cannot_place(template, conversation, whole, before)
        else:
            spans.append(None)
    return spans


def _marked_spans(
    template: ChatTemplate, conversation: Conversation, whole: Sequence[int]
) -> list[Span | None]:
    """Bounds of every answer by the template's own mask."""
    mask = template.own_mask(conversation)
    edges = [place for place in range(len(mask) + 1) if _at(mask, place) != _at(mask, place - 1)]
    runs = list(zip(edges[::2], edges[1::2], strict=True))
    if len(mask) != len(whole) or len(runs) != len(conversation.answers):
        raise DataError(
            f"{conversation.place or 'conversation'}: the chat template of {template.name} marks "
            f"{len(runs)} answers in {len(mask)} tokens, expected {len(conversation.answers)} in "
            f"{len(whole)}. Its generation blocks do not enclose every answer: mend the template, "
            "or take the blocks out, and answers are found by rendering turn by turn."
        )
    return [(start, stop) for start, stop in runs]


def _at(mask: Sequence[bool], place: int) -> bool:
    return 0 <= place < len(mask) and mask[place]


def _begins(whole: Sequence[int], part: Sequence[int]) -> bool:
    return list(whole[: len(part)]) == list(part)


def _end_of_answer(template: ChatTemplate, whole: Sequence[int], start: int, stop: int) -> int:
    """Behind the last end-of-sequence token in ``[start, stop)``; ``stop`` where there is none."""
    ends = [place for place in range(start, stop) if whole[place] in template.end_ids]
    return ends[-1] + 1 if ends else stop


def _check_text(
    template: ChatTemplate, conversation: Conversation, content: str, ids: Sequence[int]
) -> None:
    """The supervised tokens say what the message says, but for white space."""
    text = template.decode(list(ids))
    if _squeezed(content) in _squeezed(text):
        return
    raise DataError(
        f"{conversation.place or 'conversation'}: the supervised tokens read {text!r:.120}, "
        f"expected the answer {content!r:.120}. The chat template of {template.name} changes what "
        "the assistant said, so the mask would train on other words. Let the verifier write the "
        "answers (capture.regenerate), or use a template that keeps them."
    )


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _cannot_place(
    template: ChatTemplate, conversation: Conversation, whole: Sequence[int], before: Sequence[int]
) -> DataError:
    same = next(
        (
            place
            for place, pair in enumerate(zip(whole, before, strict=False))
            if pair[0] != pair[1]
        ),
        min(len(whole), len(before)),
    )
    return DataError(
        f"{conversation.place or 'conversation'}: the last answer cannot be told from its prompt. "
        f"Asked for it, the chat template of {template.name} gives {len(before)} tokens that end "
        f"in {template.decode(list(before[same:]))!r:.60}; with the answer in place it writes "
        f"{template.decode(list(whole[same : same + 12]))!r:.60} there. A server would generate "
        "after other tokens than those trained on. Let the verifier write the answers "
        "(capture.regenerate), or use a template whose prompt is the beginning of the whole."
    )
