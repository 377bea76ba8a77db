"""A drafter on held-out shards, and decoding live, as a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.checks import check, check_paths
from eagle3.decoding.speed import lengths_of
from eagle3.evaluation.config import EvaluateConfig
from eagle3.evaluation.report import Report
from eagle3.evaluation.settings import evaluation_config

if TYPE_CHECKING:
    from eagle3.evaluation.held_out import HeldOut

_BY_ROUND = "val/round_acc/"
_LIVE_TOKENS = 20_000_000
"""Of held-out documents that prompts are taken from."""


def evaluate_drafter(
    settings: EvaluateConfig, overridden: Sequence[str], out: Path, say: Callable[[str], None]
) -> Report:
    """Judge ``ckpt`` or ``head`` on held-out shards, and live where ``live.held_out`` asks for it.

    Args:
        overridden: dotted keys that the command line sets.
        out: see :func:`eagle3.evaluation.held_out.evaluate_held_out`.
    """
    config = evaluation_config(settings, overridden)
    check(config)
    check_paths(config)
    from eagle3.evaluation.held_out import evaluate_held_out  # Lightning, seconds after mistakes
    from eagle3.evaluation.live_report import add_live, check_live, measure_live

    check_live(settings.live)
    found = evaluate_held_out(config, out, say)
    report = _report(f"{settings.ckpt or settings.head} on held-out shards", found)
    if settings.live.held_out:
        from eagle3.evaluation.live_inputs import document_prompts, load_models

        documents = found.inputs.data.validation_tokens(_LIVE_TOKENS)
        prompts = document_prompts(documents, settings.live)
        live = measure_live(load_models(config, settings.live), prompts, settings.live, say)
        add_live(report, live, settings.live)
    return report


def evaluate_live(
    settings: EvaluateConfig, overridden: Sequence[str], say: Callable[[str], None]
) -> Report:
    """Answer ``prompts`` with ``ckpt`` or ``head``; needs the verifier and no shards."""
    config = evaluation_config(settings, overridden)
    from eagle3.evaluation.live_inputs import file_prompts, load_models, verifier_directory
    from eagle3.evaluation.live_report import add_live, check_live, measure_live

    check_live(settings.live)
    assert settings.prompts is not None
    models = load_models(config, settings.live)
    prompts = file_prompts(Path(settings.prompts), verifier_directory(config), settings.live)
    report = Report(f"{settings.ckpt or settings.head} on {Path(settings.prompts).name}, live")
    add_live(report, measure_live(models, prompts, settings.live, say), settings.live)
    return report


def only_figures(settings: EvaluateConfig) -> bool:
    """Whether nothing is judged and speed is computed from acceptance that is given."""
    nothing = (settings.ckpt, settings.head, settings.prompts) == (None, None, None)
    return nothing and bool(settings.speed.acceptance) and settings.speed.baseline_tok_s is not None


def _report(title: str, found: HeldOut) -> Report:
    first = "val/acceptance_replay"
    figures = {first: found.figures[first], **found.figures}
    report = Report(title, figures, found.references)
    names = sorted(name for name in figures if name.startswith(_BY_ROUND))
    by_round = tuple(figures[name] for name in names)
    report.by_position["held-out rounds"], report.lengths = by_round, lengths_of(by_round)
    report.details["documents"] = found.num_documents
    return report
