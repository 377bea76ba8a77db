"""The jobs of a sweep, or any run folders, as they are found on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from eagle3.errors import ConfigError
from eagle3.run_folder import (
    COMPLETE,
    CONFIG_FILE,
    FAILED_JOBS_FILE,
    SUMMARY_FILE,
    X_AXIS,
    Rows,
    read_elsewhere,
    read_failed_jobs,
    read_json,
    read_metrics,
    series,
)

ACCEPTANCE, BEST = "val/acceptance_replay", "best/acceptance_replay"
UNFINISHED = "unfinished"
"""Exit reason of a run folder without ``summary.json``: still running, or killed."""

Settings = Mapping[str, Any]
"""Dotted config key -> value; lists are values."""


@dataclass(frozen=True)
class JobResult:
    """One job, with or without a run folder."""

    name: str
    settings: Settings
    exit_reason: str
    message: str = ""
    """What went wrong, in one line."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """``summary.json``; of an unfinished run, ``steps`` and ``best/*`` so far."""
    rows: Rows = ()
    folder: Path | None = None
    """The run folder, if the job came to one."""

    @property
    def complete(self) -> bool:
        """Not cut short, so that it can be ranked."""
        return self.exit_reason in COMPLETE

    @property
    def best(self) -> float | None:
        """Highest ``val/acceptance_replay``; null without a validation."""
        value: float | None = self.figures.get(BEST)
        return value


def is_run_folder(folder: Path) -> bool:
    """Whether ``eagle3.train`` made this folder for one run."""
    return (folder / CONFIG_FILE).is_file()


def find_jobs(folder: Path) -> list[JobResult]:
    """The run in ``folder``, or every job of the sweep in it, by name.

    A failed job is one entry, whether or not it came as far as a run folder.

    Raises:
        ConfigError: ``folder`` is neither.
    """
    if is_run_folder(folder):
        return [_read_run(folder, [])]
    if not folder.is_dir():
        raise ConfigError(f"no folder {folder}: give run folders or a sweep folder")
    failures = read_failed_jobs(folder)
    elsewhere = [path for path in read_elsewhere(folder) if is_run_folder(path)]
    runs = sorted([*elsewhere, *(path for path in folder.iterdir() if is_run_folder(path))])
    jobs = [_read_run(path, failures) for path in runs]
    jobs += [_without_folder(failure) for failure in failures]
    if not jobs:
        raise ConfigError(
            f"no job in {folder}: expected a run folder (with {CONFIG_FILE}), or a sweep folder "
            f"with run folders or {FAILED_JOBS_FILE} in it; give one of those"
        )
    return jobs


def _read_run(folder: Path, failures: list[dict[str, Any]]) -> JobResult:
    """A run folder; takes the record of its failure, if there is one, out of ``failures``."""
    config = OmegaConf.to_container(OmegaConf.load(folder / CONFIG_FILE))
    assert isinstance(config, dict)
    failure = _take(failures, config)
    rows = read_metrics(folder)
    if (folder / SUMMARY_FILE).is_file():
        figures = read_json(folder, SUMMARY_FILE)
        reason = figures["exit_reason"]
    else:
        figures = _figures_so_far(rows)
        reason = failure.get("exit_reason", UNFINISHED)
    message = failure.get("message", "")
    return JobResult(
        folder.name, dict(_flat(config)), reason, message, figures, rows, folder.resolve()
    )


def _take(failures: list[dict[str, Any]], config: Mapping[Any, Any]) -> dict[str, Any]:
    for index, failure in enumerate(failures):
        if failure["config"] == config:
            return failures.pop(index)
    return {}


def _figures_so_far(rows: Rows) -> dict[str, Any]:
    steps, lengths = series(rows, ACCEPTANCE)
    figures: dict[str, Any] = {"steps": int(max((row[X_AXIS] for row in rows), default=0))}
    if lengths:
        best = max(lengths)
        figures |= {BEST: best, "best/step": int(steps[lengths.index(best)])}
    return figures


def _without_folder(failure: Mapping[str, Any]) -> JobResult:
    """A job that failed before it had a run folder, mostly by a value that is refused."""
    config = failure["config"]
    settings = _overrides(failure["overrides"]) if config is None else dict(_flat(config))
    name = f"job {failure['number']}"
    return JobResult(name, settings, failure["exit_reason"], failure["message"])


def _overrides(lines: Sequence[str]) -> dict[str, Any]:
    pairs = (line.lstrip("+~").split("=", 1) for line in lines if "=" in line)
    return {key: _scalar(text) for key, text in pairs}


def _scalar(text: str) -> Any:
    try:
        return json.loads(text)  # reads 1e-5, which YAML takes for a string
    except ValueError:
        return text


def _flat(node: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
