"""``sweep_summary.{csv,md,png}`` of a sweep folder, or of run folders from anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from eagle3.reporting.comparison import compare
from eagle3.reporting.jobs import JobResult, find_jobs
from eagle3.reporting.pictures import draw_comparison
from eagle3.reporting.tables import markdown, write_csv

NAME = "sweep_summary"


def write_sweep_summary(folders: Sequence[Path], out: Path) -> str:
    """Compare all runs in ``folders`` and write the three files into ``out``.

    Returns:
        The Markdown.

    Raises:
        ConfigError: one of ``folders`` is neither a run folder nor a sweep folder.
    """
    comparison = compare(_distinct(job for folder in folders for job in find_jobs(folder)))
    title = folders[0].resolve().name if len(folders) == 1 else f"{len(folders)} folders"
    text = markdown(comparison, title, f"{NAME}.png")
    out.mkdir(parents=True, exist_ok=True)
    write_csv(comparison, out / f"{NAME}.csv")
    (out / f"{NAME}.md").write_text(text, encoding="utf-8")
    draw_comparison(comparison, out / f"{NAME}.png", title=title)
    return text


def _distinct(jobs: Iterable[JobResult]) -> list[JobResult]:
    """Each run folder once: given twice, it would pass for two seeds."""
    found = {(job.folder or index): job for index, job in enumerate(jobs)}
    return list(found.values())
