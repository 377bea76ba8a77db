"""A comparison of runs as CSV and as Markdown."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3.reporting.comparison import SEED, Comparison, Setting, as_override
from eagle3.reporting.jobs import BEST, JobResult

_FIGURES = (BEST, "best/accuracy", "best/step", "steps", "gpu_hours", "cpu_hours")


def write_csv(comparison: Comparison, path: Path) -> None:
    """One line a job: the ranked ones, then those cut short; what is not known is empty.

    ``setting/*`` are seeds, mean and sample deviation of the jobs with the same knobs.
    """
    knobs = comparison.knobs
    setting_columns = ("setting/seeds", "setting/mean", "setting/deviation")
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["run", *knobs, SEED, *_FIGURES, *setting_columns, "exit_reason", "message"])
        for job in [*comparison.ranked, *comparison.cut_short]:
            table.writerow(
                [
                    job.name,
                    *(job.settings.get(knob) for knob in [*knobs, SEED]),
                    *(job.figures.get(name) for name in _FIGURES),
                    *_setting_cells(comparison.setting_of(job)),
                    job.exit_reason,
                    job.message,
                ]
            )


def _setting_cells(setting: Setting | None) -> list[Any]:
    if setting is None:
        return [None, None, None]
    return [len(setting.lengths), setting.mean, setting.deviation]


def markdown(comparison: Comparison, title: str, picture: str) -> str:
    """The best override line, the ranked jobs, settings over their seeds, and what was cut short.

    Args:
        picture: path of the picture, as seen from the Markdown file.
    """
    parts = [f"# {title}", best_line(comparison)]
    if comparison.data_fingerprints > 1:
        parts.append(
            f"The runs saw {comparison.data_fingerprints} different data sets (data/fingerprint): "
            "their acceptance lengths do not compare."
        )
    if comparison.ranked:
        parts.append(_job_table(comparison.ranked, comparison.knobs))
    if any(len(setting.lengths) > 1 for setting in comparison.settings):
        parts += ["## Settings over their seeds", _setting_table(comparison)]
    if comparison.cut_short:
        parts += ["## Failed and unfinished", _cut_short_table(comparison)]
    return "\n\n".join([*parts, f"![acceptance lengths]({picture})"]) + "\n"


def best_line(comparison: Comparison) -> str:
    """The winner as an override to copy, with its figure."""
    if not comparison.settings:
        return "best: none; no complete run has measured an acceptance length"
    best = comparison.settings[0]
    what = f"`{best.override_line}`" if best.values else "one setting, no knob differs"
    return f"best: {what}: {_spread(best)} tokens per verifier pass ({_seeds(best)})"


def _spread(setting: Setting) -> str:
    deviation = "" if setting.deviation is None else f" ± {setting.deviation:.3f}"
    return f"{setting.mean:.3f}{deviation}"


def _seeds(setting: Setting) -> str:
    count = len(setting.lengths)
    return "one run" if count == 1 else f"mean and deviation of {count} runs"


def _job_table(jobs: Sequence[JobResult], knobs: Sequence[str]) -> str:
    shown = [name for name in _FIGURES if any(job.figures.get(name) is not None for job in jobs)]
    header = ["place", *knobs, SEED, *shown, "exit_reason", "run"]
    lines = [
        [
            str(place) if job.best is not None else "-",
            *_knob_cells(job, [*knobs, SEED]),
            *(_figure(job.figures.get(name)) for name in shown),
            job.exit_reason,
            job.name,
        ]
        for place, job in enumerate(jobs, start=1)
    ]
    return _table(header, lines)


def _setting_table(comparison: Comparison) -> str:
    lines = [
        [
            *(as_override(value) for value in setting.values.values()),
            str(len(setting.lengths)),
            _figure(setting.mean),
            _figure(setting.deviation),
        ]
        for setting in comparison.settings
    ]
    return _table([*comparison.knobs, "runs", f"mean {BEST}", "deviation"], lines)


def _cut_short_table(comparison: Comparison) -> str:
    keys = [*comparison.knobs, SEED]
    lines = [
        [
            job.name,
            *_knob_cells(job, keys),
            _figure(job.figures.get("steps")),
            _figure(job.best),
            job.exit_reason,
            job.message or "-",
        ]
        for job in comparison.cut_short
    ]
    return _table(["run", *keys, "steps", f"{BEST} so far", "exit_reason", "message"], lines)


def _knob_cells(job: JobResult, keys: Sequence[str]) -> list[str]:
    return [as_override(job.settings[key]) if key in job.settings else "-" for key in keys]


def _figure(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    ruled = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(c.replace("|", r"\|") for c in row) + " |" for row in ruled)
