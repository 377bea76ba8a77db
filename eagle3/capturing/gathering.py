"""From what was given to documents: token ids and what of them is supervised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from eagle3.capturing.answering import Answering, wanted_answers
from eagle3.capturing.documents import Document, label, restricted
from eagle3.capturing.engines import Engine
from eagle3.capturing.plan import CapturePlan
from eagle3.capturing.responses import Responses
from eagle3.conversations.masking import masked_tokens
from eagle3.conversations.messages import Conversation
from eagle3.conversations.template import ChatTemplate
from eagle3.data.bad_samples import BadSamples
from eagle3.errors import DataError
from eagle3.names import Regenerate

_SHORTEST = 2


def gather(
    plan: CapturePlan,
    engine: Engine,
    answers: Path,
    failed: BadSamples,
    log: Callable[[str], None],
) -> list[Document]:
    """Every usable document of this part, in the order of the input.

    Args:
        answers: file that keeps what the verifier has written, made where it is needed.
        failed: takes the others, with reasons.

    Raises:
        DataError: more fail than are allowed, or none is usable.
    """
    found = _found(plan, engine, answers, log)
    documents = []
    for name, document in found:
        if isinstance(document, Document):
            reason = _unfit(document, plan)
            if reason is None:
                documents.append(restricted(document, plan.settings.train_on))
                continue
        else:
            reason = str(document)
        failed.add(name, reason)
    if not documents:
        raise DataError(
            "\n".join([f"{plan.source}: no document can be captured:", *failed.lines[:5]])
        )
    return documents


def expected_tokens(plan: CapturePlan) -> tuple[int, int]:
    """Documents and tokens, answers that are not written yet at their full length.

    Raises:
        DataError, VerifierError: as the template says.
    """
    if plan.settings.tokens is not None:
        return len(plan.items), sum(len(item.ids) for item in _documents(plan))
    template = ChatTemplate.load(plan.verifier_dir)
    tokens = 0
    for item in _conversations(plan):
        wanted = wanted_answers(item, plan.settings.answers.regenerate)
        before = item.until(wanted[-1]) if wanted else item.up_to_last_answer()
        tokens += len(template.ids(before, ask=bool(wanted)))
        tokens += plan.sampling.max_new_tokens if wanted else 0
    return len(plan.items), tokens


def _found(
    plan: CapturePlan, engine: Engine, answers: Path, log: Callable[[str], None]
) -> list[tuple[str, Document | DataError]]:
    if plan.settings.tokens is not None:
        return [(document.place, document) for document in _documents(plan)]
    conversations = _conversations(plan)
    template = ChatTemplate.load(plan.verifier_dir)
    which = plan.settings.answers.regenerate
    waiting = [
        (number, conversation, wanted)
        for number, conversation in enumerate(conversations)
        if (wanted := wanted_answers(conversation, which))
    ]
    written = _written(plan, engine, template, answers, waiting, log) if waiting else {}
    return [
        (_name(conversation, number), written.get(number) or _given(template, conversation))
        for number, conversation in enumerate(conversations)
    ]


def _written(
    plan: CapturePlan,
    engine: Engine,
    template: ChatTemplate,
    answers: Path,
    waiting: Sequence[tuple[int, Conversation, tuple[int, ...]]],
    log: Callable[[str], None],
) -> dict[int, Document | DataError]:
    with Responses(answers, plan.job) as responses:
        answering = Answering(
            template,
            engine.generator,
            responses,
            plan.sampling,
            plan.settings.answers.batch_tokens,
            log,
        )
        return answering.documents(waiting)


def _given(template: ChatTemplate, conversation: Conversation) -> Document | DataError:
    try:
        found = masked_tokens(template, conversation)
    except DataError as error:
        return error
    return Document(found.ids, found.spans, label(conversation.source), conversation.place)


def _unfit(document: Document, plan: CapturePlan) -> str | None:
    """Why a document cannot be captured; None: it can."""
    limit, words = plan.settings.max_length, plan.verifier.vocab_size
    where = document.place or "a document"
    if len(document.ids) < _SHORTEST:
        return f"{where}: found {len(document.ids)} tokens, expected at least {_SHORTEST}"
    if max(document.ids) >= words:
        return (
            f"{where}: found token {max(document.ids)}, expected ids below {words}, the vocabulary "
            f"of {plan.verifier.name}: take the verifier that wrote the tokens"
        )
    if limit is not None and len(document.ids) > limit:
        return f"{where}: found {len(document.ids):,} tokens, max_length allows {limit:,}"
    if not document.spans:
        return f"{where}: found nothing to supervise, expected an answer"
    return None


def _name(conversation: Conversation, number: int) -> str:
    return conversation.place or f"conversation {number}"


def _documents(plan: CapturePlan) -> list[Document]:
    return [item for item in plan.items if isinstance(item, Document)]


def _conversations(plan: CapturePlan) -> list[Conversation]:
    return [item for item in plan.items if isinstance(item, Conversation)]


def writes_answers(plan: CapturePlan) -> bool:
    """Whether the verifier has something to write."""
    which = plan.settings.answers.regenerate
    asked = plan.settings.prompts is not None and which is not Regenerate.off
    return asked and any(wanted_answers(item, which) for item in _conversations(plan))
