"""Files of a run folder: their names, and how they are read back."""

from __future__ import annotations

import csv
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3.errors import ConfigError

CONFIG_FILE = "config.yaml"
PROVENANCE_FILE = "provenance.json"
METRICS_FILE = "metrics.csv"
SUMMARY_FILE = "summary.json"
CURVES_FILE = "curves.png"
REPORT_FILE = "summary.md"
HEARTBEAT_FILE = "heartbeat.json"
STACKS_FILE = "stacks.txt"
"""Where each thread of rank 0 was, when no step came for long."""
FAILED_JOBS_FILE = "failed_jobs.jsonl"
"""In a sweep folder: one line for each job that raised an error."""
ELSEWHERE_FILE = "runs_elsewhere.txt"
"""In a sweep folder: run folders of its jobs that an earlier sweep had begun, one a line."""

FINISHED, MAX_STEPS, EARLY_STOP = "finished", "max_steps", "early_stop"
COMPLETE = (FINISHED, MAX_STEPS, EARLY_STOP)
"""Exit reasons of a run that was not cut short; all others can go on."""
INTERRUPTED = "interrupted"
"""Exit reason of a run that a signal ended."""

X_AXIS = "trainer/global_step"
"""Column of ``metrics.csv`` that counts optimizer steps."""

Rows = Sequence[Mapping[str, float]]


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """Rows of ``metrics.csv`` without their empty cells; no file, no rows."""
    path = run_dir / METRICS_FILE
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


def series(rows: Rows, name: str) -> tuple[list[float], list[float]]:
    """Optimizer steps and finite values of one metric."""
    points = [(row[X_AXIS], row[name]) for row in rows if math.isfinite(row.get(name, math.nan))]
    return [step for step, _ in points], [value for _, value in points]


def checkpoints(run_dir: Path) -> Path:
    """Folder of the checkpoints."""
    return run_dir / "checkpoints"


def read_json(run_dir: Path, name: str) -> dict[str, Any]:
    """``provenance.json`` or ``summary.json`` of a run folder.

    Raises:
        ConfigError: the folder has no such file.
    """
    path = run_dir / name
    if not path.is_file():
        raise ConfigError(
            f"no {name} in {run_dir}: expected the folder of a run of eagle3.train"
            + (" that came to its end" if name == SUMMARY_FILE else "")
        )
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def write_json(run_dir: Path, name: str, content: Mapping[str, Any]) -> None:
    """Write a file for :func:`read_json`; a number that is not finite becomes null."""
    plain = {key: _plain(value) for key, value in content.items()}
    (run_dir / name).write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")


def best_value(run_dir: Path) -> float:
    """The best ``val/acceptance_replay`` of a run that came to its end; 0 without a validation."""
    best = read_json(run_dir, SUMMARY_FILE)["best/acceptance_replay"]
    return 0.0 if best is None else float(best)


def note_elsewhere(sweep_dir: Path | None, run_dir: Path) -> None:
    """Keep where a job of this sweep lies that is not in the folder of the sweep."""
    if sweep_dir is None or run_dir.parent == sweep_dir:
        return
    sweep_dir.mkdir(parents=True, exist_ok=True)
    with (sweep_dir / ELSEWHERE_FILE).open("a", encoding="utf-8") as file:
        file.write(f"{run_dir}\n")


def read_elsewhere(sweep_dir: Path) -> list[Path]:
    """Run folders of :func:`note_elsewhere` that are still there, each once."""
    path = sweep_dir / ELSEWHERE_FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [run for line in dict.fromkeys(lines) if (run := Path(line)).is_dir()]


def append_failed_job(
    sweep_dir: Path,
    *,
    number: int,
    error: Exception,
    overrides: Sequence[str],
    config: Mapping[Any, Any] | None,
    code: int = 1,
) -> None:
    """Keep what is known about a failed job, which may have come to no run folder.

    Args:
        number: place of the job in the sweep, from 0.
        config: resolved, as in ``config.yaml``; null when it was refused.
        code: exit code that the failure means.
    """
    record = {
        "number": number,
        "exit_reason": f"error: {type(error).__name__}",
        "message": " ".join(str(error).split()),
        "overrides": list(overrides),
        "config": config,
        "code": code,
        "time": time.time(),
    }
    sweep_dir.mkdir(parents=True, exist_ok=True)
    line = (json.dumps(record) + "\n").encode()
    with (sweep_dir / FAILED_JOBS_FILE).open("ab", buffering=0) as file:
        file.write(line)  # in one piece, as jobs side by side append to the same file


def read_failed_jobs(sweep_dir: Path) -> list[dict[str, Any]]:
    """Records of :func:`append_failed_job`; no file, no record."""
    path = sweep_dir / FAILED_JOBS_FILE
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
