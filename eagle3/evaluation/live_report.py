"""Live decoding as a report: figures, the table by number of drafts, and where the time goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.decoding.costs import Costs
from eagle3.decoding.speed import SpeedRow, best, lengths_of, speed_table
from eagle3.errors import ConfigError
from eagle3.evaluation.config import LiveConfig
from eagle3.evaluation.live import (
    PLAIN,
    Comparison,
    Timed,
    compare_with_generate,
    decode_by_turns,
    replay_lengths,
)
from eagle3.evaluation.live_inputs import LiveModels
from eagle3.evaluation.report import Report
from eagle3.names import DecodingPart

MIN_TABLE = 7
"""Drafts up to which speed is predicted."""


@dataclass(frozen=True, eq=False)
class Found:
    """All that one live evaluation has measured."""

    prompts: Sequence[Tensor]
    by_way: dict[int, Timed]
    comparison: Comparison | None
    """None: sampled answers have nothing to be equal to."""
    lengths: list[float]
    """Acceptance length with 1, 2, ... drafts."""
    replayed: bool
    """Whether these are of the same answers walked again, or from the shares of live rounds."""
    costs: Costs


def check_live(live: LiveConfig) -> None:
    """Refuse what cannot be measured.

    Raises:
        ConfigError: a line per key.
    """
    wrong = []
    if not live.draft_tokens or min(live.draft_tokens) < 1:
        wrong.append(
            f"live.draft_tokens={live.draft_tokens}: expected numbers of drafts, 1 or more"
        )
    for name, least in (("max_new_tokens", 2), ("batch_size", 1)):
        if getattr(live, name) < least:
            wrong.append(f"live.{name}={getattr(live, name)}: expected {least} or more")
    if not 0 < live.top_p <= 1:
        wrong.append(f"live.top_p={live.top_p}: expected more than 0, at most 1")
    wrong += [
        f"live.{name}={getattr(live, name)}: expected 0 or more"
        for name in ("temperature", "top_k", "held_out")
        if getattr(live, name) < 0
    ]
    if wrong:
        raise ConfigError("\n       ".join(wrong))


def measure_live(
    models: LiveModels, prompts: Sequence[Tensor], live: LiveConfig, say: Callable[[str], None]
) -> Found:
    """Decode, compare, replay, and time single passes by the way."""
    say(
        f"decoding {len(prompts)} prompts with {', '.join(map(str, live.draft_tokens))} drafts a "
        f"round and without, {live.batch_size} at a time, up to {live.max_new_tokens} tokens each, "
        f"{live.dtype} on {models.verifier.device}, {torch.get_num_threads()} threads"
    )
    most = max(MIN_TABLE, *live.draft_tokens)
    by_way, costs = decode_by_turns(models, prompts, live, most, say)
    if live.temperature > 0:
        lengths = lengths_of(by_way[max(live.draft_tokens)].by_position)
        return Found(prompts, by_way, None, lengths, False, costs)
    comparison = compare_with_generate(models, prompts, by_way, live, say)
    answers = [by_way[PLAIN].answers[number] for number in range(len(prompts))]
    lengths = replay_lengths(models, prompts, answers, most)
    return Found(prompts, by_way, comparison, lengths, True, costs)


def add_live(report: Report, found: Found, live: LiveConfig) -> None:
    """Put figures, tables and notes of a live evaluation into ``report``."""
    plain, main = found.by_way[PLAIN], found.by_way[live.draft_tokens[0]]
    rows = speed_table(found.lengths, found.costs, live.batch_size)
    predicted = rows[live.draft_tokens[0] - 1]
    figures = report.figures
    figures["live/acceptance_length"] = main.acceptance_length
    if found.replayed:
        figures["live/acceptance_replay"] = found.lengths[live.draft_tokens[0] - 1]
    figures["live/tokens_per_s"] = main.tokens / main.seconds
    figures["live/plain_tokens_per_s"] = plain.tokens / plain.seconds
    figures["live/speedup"] = _speed(main) / _speed(plain)
    figures["live/speedup_predicted"] = predicted.speedup
    if found.comparison is not None:
        total = len(found.prompts) * len(found.by_way)
        figures["live/lossless"] = (found.comparison.same + found.comparison.excused) / total
        report.notes += _comparison_notes(found.comparison, total)
    report.lengths = found.lengths
    report.by_position["live rounds"] = main.by_position
    for way, timed in found.by_way.items():
        report.speeds[_name(way)] = timed.tokens / timed.seconds
    report.tables["By number of drafts"] = [_row(row, found) for row in rows]
    report.tables["Where the time goes"] = [
        {"decoding": _name(way), **_split(timed)} for way, timed in found.by_way.items()
    ]
    report.curves["predicted"] = {row.draft_tokens: row.speedup for row in rows}
    report.curves["measured"] = {
        way: _speed(timed) / _speed(plain) for way, timed in found.by_way.items() if way != PLAIN
    }
    report.notes += _speed_notes(rows, found.costs)
    report.details["answers"] = {
        _name(way): [
            {"ids": list(answer.ids), "rounds": answer.rounds}
            for _, answer in sorted(timed.answers.items())
        ]
        for way, timed in found.by_way.items()
    }


def _name(way: int) -> str:
    return "without drafting" if way == PLAIN else f"{way} drafts"


def _decoding_s(timed: Timed) -> float:
    """Without the prompts, which cost the same in every way."""
    return timed.seconds - timed.clock.seconds[DecodingPart.prefill]


def _speed(timed: Timed) -> float:
    """Tokens per second of the rounds."""
    emitted = sum(answer.emitted for answer in timed.answers.values())
    return emitted / max(_decoding_s(timed), 1e-9)


def _row(row: SpeedRow, found: Found) -> dict[str, str]:
    timed = found.by_way.get(row.draft_tokens)
    plain = found.by_way[PLAIN]
    measured = "" if timed is None else f"{_speed(timed) / _speed(plain):.2f}"
    return {
        "drafts": str(row.draft_tokens),
        "acceptance length": f"{row.acceptance_length:.3f}",
        "live": "" if timed is None else f"{timed.acceptance_length:.3f}",
        "ms a round": f"{1e3 * row.round_s:.1f}",
        "ms a token": f"{1e3 / row.tokens_per_s:.1f}",
        "speedup, predicted": f"{row.speedup:.2f}",
        "speedup, measured": measured,
        "breaks even at": f"{row.break_even:.2f}",
        "rate for that": "never" if row.break_even_rate is None else f"{row.break_even_rate:.0%}",
    }


def _split(timed: Timed) -> dict[str, str]:
    parts = {str(part): timed.clock.seconds[part] for part in DecodingPart}
    parts["rest"] = max(timed.seconds - timed.clock.total, 0.0)
    shares = {name: f"{seconds / timed.seconds:.1%}" for name, seconds in parts.items()}
    return {"seconds": f"{timed.seconds:.1f}", "tokens": f"{timed.tokens:,}", **shares}


def _comparison_notes(comparison: Comparison, total: int) -> list[str]:
    notes = [
        f"lossless: {comparison.same} of {total} answers equal the verifier's own generate token "
        f"by token, {comparison.excused} differ first where its two best logits are within rounding"
    ]
    if comparison.wrong:
        notes.append(
            f"warning: {len(comparison.wrong)} answers are NOT the verifier's own, which must not "
            f"happen: {'; '.join(comparison.wrong[:5])}"
        )
    return notes


def _speed_notes(rows: Sequence[SpeedRow], costs: Costs) -> list[str]:
    fastest = best(rows)
    single = costs.verifier_s[0]
    relative = ", ".join(f"{seconds / single:.2f}" for seconds in costs.verifier_s)
    return [
        f"a verifier pass over 1, 2, ... tokens costs {relative} times one of {1e3 * single:.1f} "
        f"ms; the drafter {1e3 * costs.first_draft_s:.1f} ms for the first draft and "
        f"{1e3 * costs.next_draft_s:.1f} ms for each further one",
        f"best by the model: {fastest.draft_tokens} drafts, {fastest.speedup:.2f}x"
        + ("" if fastest.speedup > 1 else "; drafting does not pay here, see 'breaks even at'"),
    ]
