"""A drafter on held-out shards as a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.checks import check, check_paths
from eagle3.evaluation.config import EvaluateConfig
from eagle3.evaluation.report import Report
from eagle3.evaluation.settings import evaluation_config

if TYPE_CHECKING:
    from eagle3.evaluation.held_out import HeldOut

_PREFIX = "val/full_acc/"


def evaluate_drafter(
    settings: EvaluateConfig, overridden: Sequence[str], out: Path, say: Callable[[str], None]
) -> Report:
    """Judge ``ckpt`` or ``head`` on held-out shards.

    Args:
        overridden: dotted keys that the command line sets.
        out: see :func:`eagle3.evaluation.held_out.evaluate_held_out`.
    """
    config = evaluation_config(settings, overridden)
    check(config)
    check_paths(config)
    from eagle3.evaluation.held_out import evaluate_held_out  # Lightning, seconds after mistakes

    found = evaluate_held_out(config, out, say)
    return _report(f"{settings.ckpt or settings.head} on held-out shards", found)


def _report(title: str, found: HeldOut) -> Report:
    first = "val/acceptance_replay"
    figures = {first: found.figures[first], **found.figures}
    report = Report(title, figures, found.references)
    names = sorted(name for name in figures if name.startswith(_PREFIX))
    report.by_position["held-out rows"] = tuple(figures[name] for name in names)
    report.details["documents"] = found.num_documents
    return report
