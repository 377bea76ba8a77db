"""Acceptance and throughput of a running server, with and without drafting, on the same prompts."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from eagle3.conversations.messages import Conversation
from eagle3.evaluation.config import ServerConfig
from eagle3.evaluation.engines import Answer, Counters, Engine, find_engine
from eagle3.server_http import ServerError

_FOREIGN_SHARE = 1.2
"""Tokens counted by the server over ours, above which somebody else was using it."""
_LINES = 20
"""Progress lines of a measurement."""


@dataclass(frozen=True)
class ServerFigures:
    """What a server did with the prompts."""

    engine: str
    answers: tuple[Answer, ...]
    failed: tuple[str, ...]
    """Prompts that got no answer, and why."""
    seconds: float
    """Wall time of all of them."""
    acceptance_length: float
    """Tokens per verifier pass; NaN: the server does not draft."""
    by_position: tuple[float, ...]
    """Share of the passes that accepted draft 1, 2, ...; empty: not said."""
    warnings: tuple[str, ...]

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """Of all requests together."""
        return self.tokens / self.seconds

    @property
    def request_tokens_per_s(self) -> float:
        """Median over requests, what one user sees."""
        return statistics.median(answer.tokens / answer.seconds for answer in self.answers)


def measure(
    url: str,
    conversations: Sequence[Conversation],
    settings: ServerConfig,
    say: Callable[[str], None],
) -> ServerFigures:
    """Send every prompt once, ``settings.in_flight`` at a time, after one that is not counted.

    Raises:
        ServerError: the server cannot be used, or answers no prompt at all.
    """
    engine = find_engine(url)
    say(f"{url}: {engine.name}")
    engine.ask(conversations[0], settings)  # compiles, captures graphs, fills caches
    before = engine.counters()
    started = time.monotonic()
    answers, failed = _ask_all(engine, conversations, settings, say)
    seconds = time.monotonic() - started
    if not answers:
        raise ServerError(
            f"{url}: answered none of {len(conversations)} prompts, expected most. {failed[0]}"
        )
    after = engine.counters()
    counted = None if before is None or after is None else after.since(before)
    length, by_position = _acceptance(answers, counted)
    return ServerFigures(
        engine=engine.name,
        answers=tuple(answers),
        failed=tuple(failed),
        seconds=seconds,
        acceptance_length=length,
        by_position=by_position,
        warnings=tuple(_warnings(answers, failed, counted)),
    )


def _ask_all(
    engine: Engine,
    conversations: Sequence[Conversation],
    settings: ServerConfig,
    say: Callable[[str], None],
) -> tuple[list[Answer], list[str]]:
    answers, failed = [], []
    started = time.monotonic()
    every = max(len(conversations) // _LINES, 1)
    with ThreadPoolExecutor(settings.in_flight) as pool:
        asked = {pool.submit(engine.ask, each, settings): each for each in conversations}
        for done, future in enumerate(as_completed(asked), 1):
            try:
                answers.append(future.result())
            except ServerError as error:
                failed.append(f"{asked[future].place or 'prompt'}: {error}")
            if done % every == 0:
                passed = time.monotonic() - started
                left = passed / done * (len(conversations) - done)
                say(f"{done} of {len(conversations)} prompts, about {left:.0f} s left")
    return answers, failed


def _acceptance(
    answers: Sequence[Answer], counted: Counters | None
) -> tuple[float, tuple[float, ...]]:
    """Length and shares by position, of the requests or of the server's counters.

    Both engines count the bonus token: SGLang divides the tokens of an answer by its passes, vLLM
    adds one to the accepted tokens a pass.
    """
    if counted is not None:
        if not counted.passes:
            return math.nan, ()
        shares = tuple(accepted / counted.passes for accepted in counted.by_position)
        return 1 + counted.accepted / counted.passes, shares
    drafted = [answer for answer in answers if answer.passes]
    if not drafted:
        return math.nan, ()
    passes = sum(answer.passes or 0 for answer in drafted)
    width = max(len(answer.accepted) for answer in drafted)
    totals = [
        sum(answer.accepted[place] for answer in drafted if place < len(answer.accepted))
        for place in range(width)
    ]
    shares = tuple(sum(totals[place:]) / max(sum(totals), 1) for place in range(1, width))
    return sum(answer.tokens for answer in drafted) / passes, shares


def _warnings(
    answers: Sequence[Answer], failed: Sequence[str], counted: Counters | None
) -> list[str]:
    found = []
    if failed:
        found.append(f"{len(failed)} of {len(failed) + len(answers)} prompts failed: {failed[0]}")
    ours = sum(answer.tokens for answer in answers)
    if counted is not None and counted.passes + counted.accepted > _FOREIGN_SHARE * ours:
        found.append(
            f"the server counted {counted.passes + counted.accepted:,.0f} tokens, ours are "
            f"{ours:,}: others used it meanwhile, and the acceptance is partly theirs"
        )
    return found
