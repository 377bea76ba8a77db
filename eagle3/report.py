"""What a run leaves for people: ``summary.json``, ``curves.png``, five lines on how good it is.

All of it is computed from ``metrics.csv`` and a few facts, as plain values. As a command,
``python -m eagle3.report RUN`` draws the curves of one run again and writes ``summary.md`` beside
them; a sweep folder or several run folders are compared in ``sweep_summary.{csv,md,png}``.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3.curves import References, draw_curves, start_reference
from eagle3.errors import ConfigError, UserError
from eagle3.reporting.jobs import JobResult, find_jobs, is_run_folder
from eagle3.reporting.sweep import NAME, write_sweep_summary
from eagle3.run_folder import (
    CURVES_FILE,
    METRICS_FILE,
    REPORT_FILE,
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Report on folders and print the Markdown.

    Returns:
        0, or 2 for wrong arguments or a folder that holds nothing to report on.
    """
    parser = argparse.ArgumentParser(prog="python -m eagle3.report", description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN_OR_SWEEP")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where the files go (the folder itself; the current one for several folders)",
    )
    args = parser.parse_args(arguments)
    try:
        print(report(args.folders, args.out))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def report(folders: Sequence[Path], out: Path | None = None) -> str:
    """Write the report on one run, or the comparison of several; returns its Markdown.

    Raises:
        ConfigError: a folder is neither a run nor a sweep, or the only run has logged nothing.
    """
    single = len(folders) == 1
    out = out or (folders[0] if single else Path())
    if single and is_run_folder(folders[0]):
        return _report_run(folders[0], out)
    text = write_sweep_summary(folders, out)
    return f"{text}\nwritten: {out / NAME}.{{csv,md,png}}"


def _report_run(run_dir: Path, out: Path) -> str:
    (job,) = find_jobs(run_dir)
    if not job.rows:
        raise ConfigError(
            f"no metrics in {run_dir / METRICS_FILE}: expected a run that has logged a step; give "
            "another folder, or wait for the first rows"
        )
    out.mkdir(parents=True, exist_ok=True)
    references = job.figures.get("references", {})
    draw_curves(job.rows, out / CURVES_FILE, title=job.name, references=references)
    text = run_markdown(job)
    (out / REPORT_FILE).write_text(text, encoding="utf-8")
    return f"{text}\nwritten: {out / REPORT_FILE}, {out / CURVES_FILE}"


def run_markdown(job: JobResult) -> str:
    """Verdict, figures and curves of one run; of an unfinished one, the figures so far."""
    ended = "exit_reason" in job.figures
    lines = verdict(job.figures) if ended else [f"{job.exit_reason}: figures so far"]
    plain = {k: v for k, v in job.figures.items() if not isinstance(v, Mapping | list)}
    return "\n".join(
        [
            f"# {job.name}",
            "",
            *(f"- {line}" for line in lines),
            "",
            "| figure | value |",
            "| --- | --- |",
            *(f"| {name} | {'-' if value is None else value} |" for name, value in plain.items()),
            "",
            f"![curves]({CURVES_FILE})",
            "",
        ]
    )


def write_report(run_dir: Path, facts: Facts) -> dict[str, Any]:
    """Write ``summary.json`` and ``curves.png`` of a run; returns the summary."""
    rows = read_metrics(run_dir)
    summary = summarize(rows, facts)
    write_json(run_dir, SUMMARY_FILE, summary)
    draw_curves(rows, run_dir / CURVES_FILE, title=facts.name, references=facts.references)
    return summary


def summarize(rows: Rows, facts: Facts) -> dict[str, Any]:
    """Final figures of a run under the names of the dashboard.

    ``best/*`` is null when no validation ran, ``start/*`` when none ran before the first step.
    ``trend/*`` feeds :func:`verdict`: the last relative change of the acceptance length, and how
    far ``val/loss`` ends above its lowest value.
    """
    judged = [row for row in rows if math.isfinite(row.get(_ACCEPTANCE, math.nan))]
    best = max(judged, key=lambda row: row[_ACCEPTANCE], default={})
    lengths = [row[_ACCEPTANCE] for row in judged]
    losses = series(rows, "val/loss")[1]
    best_step = best.get(X_AXIS)
    start = start_reference(rows)
    return {
        "name": facts.name,
        "exit_reason": facts.exit_reason,
        "best/acceptance_replay": best.get(_ACCEPTANCE),
        "best/acceptance_pooled": best.get("val/acceptance_pooled"),
        "best/accuracy": best.get("val/accuracy"),
        "best/step": None if best_step is None else int(best_step),
        "best/ckpt": facts.best_checkpoint if best else None,
        "start/acceptance_replay": start.get("start", {}).get("acceptance"),
        "start/accuracy": start.get("start", {}).get("accuracy"),
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
        "references": start | {name: dict(values) for name, values in facts.references.items()},
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


if __name__ == "__main__":
    sys.exit(main())
