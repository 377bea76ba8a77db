"""Figures of an evaluation in the summary of the training run, on disk and in W&B."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from eagle3.evaluation.config import EvaluateConfig
from eagle3.run_folder import PROVENANCE_FILE, SUMMARY_FILE, read_json, write_json

PREFIXES = ("serve/", "live/")
"""Figures that training cannot know; those of validation stand in the summary already."""


def add_to_summary(settings: EvaluateConfig, figures: Mapping[str, float]) -> str:
    """Put ``serve/*`` and ``live/*`` where the run's other figures are; returns a line about it."""
    new = {
        name: value
        for name, value in figures.items()
        if name.startswith(PREFIXES) and math.isfinite(value)
    }
    if not new:
        return "summary: nothing to add, the run has its own validation figures"
    places = []
    run_dir = Path(settings.ckpt).resolve().parent.parent if settings.ckpt else None
    if run_dir is not None and (run_dir / SUMMARY_FILE).is_file():
        write_json(run_dir, SUMMARY_FILE, {**read_json(run_dir, SUMMARY_FILE), **new})
        places.append(str(run_dir / SUMMARY_FILE))
    run = settings.wandb_run or _own_run(run_dir)
    if run is not None:
        places.append(_to_wandb(run, new))
    return (
        f"summary: {', '.join(new)} added to {' and '.join(places) or 'nothing, no run is known'}"
    )


def _own_run(run_dir: Path | None) -> str | None:
    """``PROJECT/ID`` of the run that trained the checkpoint, if it logged to W&B."""
    if run_dir is None or not (run_dir / "wandb").is_dir():
        return None
    if not (run_dir / PROVENANCE_FILE).is_file():
        return None
    return str(read_json(run_dir, PROVENANCE_FILE)["id"])


def _to_wandb(run: str, new: Mapping[str, float]) -> str:
    """Continue the run as a job of type ``serve`` for the moment that a summary takes."""
    import wandb

    *project, run_id = run.split("/")
    try:
        live = wandb.init(
            project=project[-1] if project else None,
            entity=project[-2] if len(project) > 1 else None,
            id=run_id,
            resume="allow",
            job_type="serve",
            settings=wandb.Settings(silent=True),
        )
        live.summary.update(dict(new))
        live.finish()
    except Exception as error:  # the figures are on disk, and W&B is not worth losing them
        return f"not W&B ({(str(error).splitlines() or [type(error).__name__])[0]})"
    return f"W&B run {json.dumps(run)}"
