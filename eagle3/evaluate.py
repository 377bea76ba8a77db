"""How good is a drafter? ``python -m eagle3.evaluate ckpt=RUN/checkpoints/best.ckpt``.

On held-out shards, decoding live (``live.held_out=40`` or ``prompts=FILE``), or behind a running
server (``server=URL``).
"""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.capture_progress import print_line
from eagle3.compose import Command, Job, entry_point
from eagle3.errors import ConfigError
from eagle3.evaluation.config import EvaluateConfig

if TYPE_CHECKING:
    from eagle3.evaluation.report import Report

EVALUATE = Command("evaluate", EvaluateConfig)


def evaluate(settings: EvaluateConfig, job: Job) -> float:
    """Judge, print, and write ``evaluation.{json,md,png}``; returns the acceptance length."""
    from eagle3.evaluation import report as reports  # seconds of imports
    from eagle3.evaluation.speed_report import add_prediction

    out = output_folder(settings)
    report = judge(settings, job, out)
    add_prediction(report, settings.speed)
    reports.write(report, out)
    print(*report.lines(), sep="\n")
    print(f"written: {out / reports.NAME}.md")
    if settings.ckpt is not None or settings.wandb_run is not None:
        from eagle3.evaluation.summary import add_to_summary

        print(add_to_summary(settings, report.figures))
    return next(iter(report.figures.values()))


def judge(settings: EvaluateConfig, job: Job, out: Path) -> Report:
    """By what the settings name: a server, prompts, held-out shards, or figures alone."""
    if settings.server is not None:
        from eagle3.evaluation.serving import evaluate_server

        return evaluate_server(settings, print_line)
    from eagle3.evaluation.offline import evaluate_drafter, evaluate_live, only_figures

    if only_figures(settings):
        from eagle3.evaluation.report import Report

        return Report(f"Acceptance {settings.speed.acceptance}")
    if settings.prompts is not None:
        return evaluate_live(settings, job.overridden, print_line)
    return evaluate_drafter(settings, job.overridden, out, print_line)


def output_folder(settings: EvaluateConfig) -> Path:
    """A new folder, beside the checkpoints of the run that is judged.

    Raises:
        ConfigError: it cannot be made.
    """
    beside = Path(settings.ckpt).resolve().parent.parent if settings.ckpt else Path.cwd()
    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    out = Path(settings.out) if settings.out else beside / f"evaluation_{now}"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the folder {out} ({error.strerror}): give out=/a/writable/directory"
        ) from error
    return out


if __name__ == "__main__":
    sys.exit(entry_point(evaluate, command=EVALUATE))
