"""A running server as a report."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

from eagle3.conversations.reading import read_conversations
from eagle3.decoding.speed import lengths_of
from eagle3.errors import ConfigError
from eagle3.evaluation.config import EvaluateConfig
from eagle3.evaluation.diagnosis import diagnosis
from eagle3.evaluation.report import Report
from eagle3.evaluation.server import ServerFigures, measure


def evaluate_server(settings: EvaluateConfig, say: Callable[[str], None]) -> Report:
    """Send the prompts to ``settings.server``, and to the server without speculation.

    Raises:
        ConfigError: no prompts are given.
        DataError, ServerError: they cannot be read, or a server does not answer.
    """
    if settings.prompts is None or settings.server is None:
        raise ConfigError(
            "server=URL needs prompts=FILE: prompts or conversations, one a line (.jsonl, .txt)"
        )
    prompts = read_conversations(Path(settings.prompts))
    asked = [each.until(each.answers[-1]) if each.answers else each for each in prompts]
    drafting = measure(settings.server, asked, settings.serve, say)
    report = Report(f"{drafting.engine} at {settings.server}")
    report.figures["serve/acceptance_length"] = drafting.acceptance_length
    _add(report, "drafting", drafting, "serve/tokens_per_s")
    if settings.baseline_server is not None:
        plain = measure(settings.baseline_server, asked, settings.serve, say)
        _add(report, "without drafting", plain, "serve/baseline_tokens_per_s")
        _refuse_drafting_baseline(plain, settings.baseline_server, report)
    elif settings.baseline_tok_s is not None:
        report.figures["serve/baseline_tokens_per_s"] = settings.baseline_tok_s
        report.speeds["without drafting, as given"] = settings.baseline_tok_s
    baseline = report.figures.get("serve/baseline_tokens_per_s")
    if baseline:
        report.figures["serve/speedup"] = report.figures["serve/tokens_per_s"] / baseline
    if drafting.by_position:
        report.by_position["server"] = drafting.by_position
        report.lengths = lengths_of(drafting.by_position)
    export = None if settings.export_dir is None else Path(settings.export_dir)
    report.notes += diagnosis(drafting.acceptance_length, export)
    return report


def _add(report: Report, name: str, found: ServerFigures, figure: str) -> None:
    report.figures[figure] = found.tokens_per_s
    report.figures[f"{figure}_per_request"] = found.request_tokens_per_s
    report.speeds[name] = found.tokens_per_s
    report.notes += [f"warning: {name}: {line}" for line in found.warnings]
    report.details[name] = {
        "engine": found.engine,
        "seconds": found.seconds,
        "answers": [dataclasses.asdict(answer) for answer in found.answers],
        "failed": list(found.failed),
    }


def _refuse_drafting_baseline(plain: ServerFigures, url: str, report: Report) -> None:
    if not math.isnan(plain.acceptance_length):
        report.notes.append(
            f"warning: {url} drafts too (acceptance length {plain.acceptance_length:.2f}), so it "
            "is no baseline: start it without speculation"
        )
