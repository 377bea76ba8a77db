"""What a run leaves for people: ``summary.json``, ``curves.png``, five lines on how good it is.

All of it is computed from ``metrics.csv`` and a few facts, as plain values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3.curves import References, draw_curves
from eagle3.run_folder import (
    CURVES_FILE,
    SUMMARY_FILE,
    X_AXIS,
    Rows,
    read_metrics,
    series,
    write_json,
)

_ACCEPTANCE = "val/acceptance_replay"
_NOISE = 0.01
"""Relative change of a validation figure that is not worth a sentence."""


@dataclass(frozen=True)
class Facts:
    """What the run knows and ``metrics.csv`` does not."""

    name: str
    exit_reason: str
    """``finished``, ``max_steps``, ``interrupted``, ``terminated`` or ``error: ...``."""
    tokens_per_step: int
    """Rows of one optimizer step over all ranks, at most."""
    total_steps: int
    draft_steps: int
    """Draft tokens per round in ``val/acceptance_replay``."""
    accelerator: str
    """``gpu`` or ``cpu``: which hours are counted."""
    device_hours: float
    """Wall hours of training times devices."""
    data_fingerprint: str
    vocab_coverage: float
    """Share of supervised training tokens that the draft vocabulary holds."""
    git_revision: str | None = None
    git_dirty: bool | None = None
    bad_samples: Sequence[str] = ()
    """One line per sample that was skipped."""
    best_checkpoint: str | None = None
    skipped_steps: int = 0
    """Optimizer steps left out because a gradient was not finite."""
    references: References = field(default_factory=dict)
    """Cheap drafters on the same rows: name -> {"accuracy": ..., "acceptance": ...}."""


_TIE = 0.005
"""Relative difference of acceptance lengths that is no victory."""


def write_report(run_dir: Path, facts: Facts) -> dict[str, Any]:
    """Write ``summary.json`` and ``curves.png`` of a run; returns the summary."""
    rows = read_metrics(run_dir)
    summary = summarize(rows, facts)
    write_json(run_dir, SUMMARY_FILE, summary)
    draw_curves(rows, run_dir / CURVES_FILE, title=facts.name, references=facts.references)
    return summary


def summarize(rows: Rows, facts: Facts) -> dict[str, Any]:
    """Final figures of a run under the names of the dashboard.

    ``best/*`` is null when no validation ran. ``trend/*`` feeds :func:`verdict`: the last relative
    change of the acceptance length, and how far ``val/loss`` ends above its lowest value.
    """
    judged = [row for row in rows if math.isfinite(row.get(_ACCEPTANCE, math.nan))]
    best = max(judged, key=lambda row: row[_ACCEPTANCE], default={})
    lengths = [row[_ACCEPTANCE] for row in judged]
    losses = series(rows, "val/loss")[1]
    best_step = best.get(X_AXIS)
    return {
        "name": facts.name,
        "exit_reason": facts.exit_reason,
        "best/acceptance_replay": best.get(_ACCEPTANCE),
        "best/acceptance_pooled": best.get("val/acceptance_pooled"),
        "best/accuracy": best.get("val/accuracy"),
        "best/step": None if best_step is None else int(best_step),
        "best/ckpt": facts.best_checkpoint if best else None,
        "optim/skipped_steps": facts.skipped_steps,
        "steps": int(max((row[X_AXIS] for row in rows), default=0)),
        "total_steps": facts.total_steps,
        "draft_steps": facts.draft_steps,
        "tokens_per_step": facts.tokens_per_step,
        f"{facts.accelerator}_hours": round(facts.device_hours, 4),
        "data/fingerprint": facts.data_fingerprint,
        "data/bad_samples": list(facts.bad_samples),
        "vocab/coverage": facts.vocab_coverage,
        "git/revision": facts.git_revision,
        "git/dirty": facts.git_dirty,
        "trend/acceptance": lengths[-1] / lengths[-2] - 1 if len(lengths) > 1 else None,
        "trend/val_loss_rise": losses[-1] / min(losses) - 1 if losses and min(losses) > 0 else None,
        "references": {name: dict(values) for name, values in facts.references.items()},
    }


def verdict(summary: Mapping[str, Any]) -> list[str]:
    """Five lines for a tired person: how good, against what, how it went, on what, what next."""
    return [
        _quality(summary),
        _against(summary),
        _training(summary),
        _ground(summary),
        _next_step(summary),
    ]


def _quality(summary: Mapping[str, Any]) -> str:
    length = summary["best/acceptance_replay"]
    if length is None:
        return (
            "quality:  not measured: no validation ran, or no answer in it has two supervised "
            "tokens in a row"
        )
    drafts = summary["draft_steps"]
    return (
        f"quality:  {length:.2f} tokens per verifier pass with {drafts} draft tokens a round "
        f"(1.00 = no help, {drafts + 1}.00 = perfect); the first draft token is right in "
        f"{summary['best/accuracy']:.1%} of the rows"
    )


def _against(summary: Mapping[str, Any]) -> str:
    references, length = summary["references"], summary["best/acceptance_replay"]
    if not references or length is None:
        return "against:  no references were measured on these rows"
    shown = [f"{name} {_figures(values)}" for name, values in references.items()]
    beaten = [
        name for name, values in references.items() if length > values["acceptance"] * (1 + _TIE)
    ]
    if len(beaten) == len(references):
        judgement = "the drafter beats all of them"
    elif beaten:
        judgement = f"the drafter beats only {', '.join(beaten)}"
    else:
        judgement = "the drafter beats none of them"
    return f"against:  {', '.join(shown)}: {judgement}"


def _figures(values: Mapping[str, float]) -> str:
    return f"{values['acceptance']:.2f} ({values['accuracy']:.1%})"


def _training(summary: Mapping[str, Any]) -> str:
    steps, total = summary["steps"], summary["total_steps"]
    skipped = summary["optim/skipped_steps"]
    left_out = f", {skipped:,} steps left out" if skipped else ""
    return (
        f"training: {summary['exit_reason']} after {steps:,} of {total:,} steps{left_out}, best at "
        f"step {_count(summary['best/step'])}; {_TREND_TEXT[_trend(summary)]}"
    )


def _trend(summary: Mapping[str, Any]) -> str:
    """One word for the shape of the validation curves."""
    gain, rise = summary["trend/acceptance"], summary["trend/val_loss_rise"]
    if gain is None:
        return "unknown"
    if rise is not None and rise > _NOISE and gain <= _NOISE:
        return "overfitting"
    if gain > _NOISE:
        return "improving"
    return "worse" if gain < -_NOISE else "flat"


_TREND_TEXT = {
    "unknown": "too few validations to see a trend",
    "overfitting": "overfitting: the validation loss rises while nothing is gained",
    "improving": "it was still improving when it ended",
    "worse": "the last validation was worse than the one before",
    "flat": "it had levelled off",
}


def _ground(summary: Mapping[str, Any]) -> str:
    kind = "gpu" if "gpu_hours" in summary else "cpu"
    bad = len(summary["data/bad_samples"])
    revision = summary["git/revision"]
    code = "not a checkout" if revision is None else revision[:10]
    return (
        f"ground:   {summary[f'{kind}_hours']:.2f} {kind.upper()} hours, up to "
        f"{summary['tokens_per_step']:,} tokens a step; draft vocabulary covers "
        f"{summary['vocab/coverage']:.1%} of the answers; {bad} bad sample(s) skipped; code "
        f"{code}{' with local changes' if summary['git/dirty'] else ''}"
    )


def _next_step(summary: Mapping[str, Any]) -> str:
    length = summary["best/acceptance_replay"]
    trend = _trend(summary)
    if summary["optim/skipped_steps"] > 0:
        advice = "lower lr: steps were left out because a gradient was not finite"
    elif length is None:
        advice = (
            "give validation rows: data.val_ratio > 0 with at least two prompts, or "
            "paths.val_shards; and let the run reach its first validation"
        )
    elif len(summary["data/bad_samples"]) > 0:
        advice = "look at the bad samples named in summary.json and capture them again"
    elif summary["vocab/coverage"] < 0.95:
        advice = "raise model.draft_vocab_size, or build the map from these very answers"
    elif trend == "overfitting":
        advice = f"take {summary['best/ckpt']}; more prompts help more than more epochs"
    elif trend == "improving":
        advice = "train longer (epochs), it has not reached its end"
    elif trend == "worse":
        advice = "lower lr, or raise tokens_per_step"
    else:
        advice = "capture more answers of the verifier; then sweep lr around this value"
    return f"next:     {advice}"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
