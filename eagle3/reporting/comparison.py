"""What the jobs differ in, and which setting is best over its seeds."""

from __future__ import annotations

import re
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle3.reporting.jobs import JobResult

SEED = "seed"
_NO_KNOB = re.compile(r"(paths|logger)\..*|name|resume|preflight|preflight_json|card|" + SEED)
"""Keys that say where a run lies, how it is shown or repeated, not how it is trained."""
_PLAIN = re.compile(r"[\w./+-]+")


@dataclass(frozen=True)
class Setting:
    """Complete jobs that differ in their seed only."""

    values: Mapping[str, Any]
    """Knob -> value."""
    jobs: Sequence[JobResult]
    lengths: Sequence[float]
    """``best/acceptance_replay`` of those jobs that measured it, at least one."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.lengths)

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation over seeds; null for one."""
        return statistics.stdev(self.lengths) if len(self.lengths) > 1 else None

    @property
    def override_line(self) -> str:
        """To copy behind ``python -m eagle3.train``."""
        return " ".join(shlex.quote(f"{k}={as_override(v)}") for k, v in self.values.items())


@dataclass(frozen=True)
class Comparison:
    """Jobs and settings, best first."""

    knobs: Sequence[str]
    """Config keys in which the jobs differ, without the seed."""
    ranked: Sequence[JobResult]
    """Complete jobs; those without a validation come last."""
    cut_short: Sequence[JobResult]
    """Failed and unfinished jobs, by name."""
    settings: Sequence[Setting]
    """Of the complete jobs that measured an acceptance length."""
    data_fingerprints: int
    """Different ones among the jobs; more than one makes acceptance lengths incomparable."""

    def setting_of(self, job: JobResult) -> Setting | None:
        """The setting that ``job`` counts for."""
        return next((s for s in self.settings if any(job is other for other in s.jobs)), None)


def compare(jobs: Sequence[JobResult]) -> Comparison:
    """Rank ``jobs`` by ``best/acceptance_replay``, settings by its mean over seeds.

    Two places that are equal keep the order of the jobs.
    """
    knobs = find_knobs(jobs)
    ranked = sorted((job for job in jobs if job.complete), key=_worst_last)
    prints = {job.figures.get("data/fingerprint") for job in jobs} - {None}
    return Comparison(
        knobs,
        ranked,
        [job for job in jobs if not job.complete],
        _settings(ranked, knobs),
        len(prints),
    )


def find_knobs(jobs: Sequence[JobResult]) -> list[str]:
    """Keys with more than one value among the jobs that have the key, in the config's order."""
    keys = dict.fromkeys(key for job in jobs for key in job.settings)
    return [key for key in keys if not _NO_KNOB.fullmatch(key) and _differs(key, jobs)]


def _differs(key: str, jobs: Sequence[JobResult]) -> bool:
    return len({as_override(job.settings[key]) for job in jobs if key in job.settings}) > 1


def _worst_last(job: JobResult) -> float:
    return float("inf") if job.best is None else -job.best


def _settings(ranked: Sequence[JobResult], knobs: Sequence[str]) -> list[Setting]:
    groups: dict[tuple[str, ...], list[JobResult]] = {}
    for job in ranked:
        if job.best is not None:
            key = tuple(as_override(job.settings.get(knob)) for knob in knobs)
            groups.setdefault(key, []).append(job)
    settings = [
        Setting(
            {knob: jobs[0].settings.get(knob) for knob in knobs},
            jobs,
            [job.best for job in jobs if job.best is not None],
        )
        for jobs in groups.values()
    ]
    return sorted(settings, key=lambda setting: -setting.mean)


def as_override(value: Any) -> str:
    """A value as Hydra reads it on the right of an override: 3e-4, null, [1,2], {name:kl}."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return re.sub(r"e([+-])0*(\d)", lambda found: f"e{found[1]}{found[2]}", repr(value))
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{as_override(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(as_override(item) for item in value) + "]"
    text = str(value)
    return text if _PLAIN.fullmatch(text) else "'" + text.replace("'", r"\'") + "'"
