"""What an evaluation has found: JSON for programs, Markdown and a picture for people."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eagle3.curves import PALETTE, STYLE

NAME = "evaluation"


@dataclass
class Report:
    """Sections of one evaluation."""

    title: str
    figures: dict[str, float] = field(default_factory=dict)
    """Under the dashboard's names, ``val/*``, ``live/*`` and ``serve/*``."""
    references: dict[str, dict[str, float]] = field(default_factory=dict)
    """Cheap drafters on the same rows."""
    by_position: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Share of rounds that accept draft 1, 2, ..., by what was judged."""
    lengths: list[float] = field(default_factory=list)
    """Acceptance length with 1, 2, ... drafts a round."""
    speeds: dict[str, float] = field(default_factory=dict)
    """Tokens per second, with and without drafting."""
    curves: dict[str, dict[int, float]] = field(default_factory=dict)
    """Speed over that without drafting, by number of drafts."""
    tables: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    """Rows of named columns."""
    notes: list[str] = field(default_factory=list)
    """Warnings and explanations."""
    details: dict[str, Any] = field(default_factory=dict)
    """For programs only."""

    def lines(self) -> Iterator[str]:
        """For the terminal."""
        width = max((len(name) for name in self.figures), default=0)
        for name, value in self.figures.items():
            yield f"{name:<{width}}  {value:.4g}"
        for name, found in self.references.items():
            values = ", ".join(f"{key} {value:.4g}" for key, value in found.items())
            yield f"reference {name}: {values}"
        for title, rows in self.tables.items():
            yield from ("", title, *_aligned(rows))
        yield from self.notes


def write(report: Report, out: Path) -> None:
    """Write ``evaluation.json``, ``.md`` and ``.png`` into ``out``."""
    content = {
        "title": report.title,
        "figures": _plain(report.figures),
        "references": report.references,
        "by_position": report.by_position,
        "lengths": report.lengths,
        "speeds": report.speeds,
        "curves": report.curves,
        "tables": report.tables,
        "notes": report.notes,
        "details": report.details,
    }
    (out / f"{NAME}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (out / f"{NAME}.md").write_text("\n".join(_markdown(report)) + "\n", encoding="utf-8")
    draw(report, out / f"{NAME}.png")


def _plain(figures: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}


def _markdown(report: Report) -> Iterator[str]:
    yield f"# {report.title}"
    yield ""
    yield f"![Acceptance and speed]({NAME}.png)"
    yield ""
    yield "| figure | value |"
    yield "|---|---|"
    for name, value in report.figures.items():
        yield f"| `{name}` | {value:.4g} |"
    for name, found in report.references.items():
        yield f"| {name}, acceptance length | {found.get('acceptance', math.nan):.4g} |"
    for title, rows in report.tables.items():
        yield from ("", f"## {title}", "", *_markdown_table(rows))
    if report.notes:
        yield ""
        yield from (f"- {note.strip()}" for note in report.notes)


def _markdown_table(rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    yield f"| {' | '.join(rows[0])} |"
    yield "|---" * len(rows[0]) + "|"
    yield from (f"| {' | '.join(row.values())} |" for row in rows)


def _aligned(rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    width = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    yield "  ".join(name.rjust(width[name]) for name in rows[0])
    for row in rows:
        yield "  ".join(value.rjust(width[name]) for name, value in row.items())


def draw(report: Report, path: Path) -> None:
    """Panels: acceptance by position, acceptance lengths, tokens per second, speed by drafts."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(13, 8.4), dpi=110, layout="constrained")
        FigureCanvasAgg(figure)
        (positions, lengths), (speeds, curves) = figure.subplots(2, 2)
        _draw_positions(positions, report.by_position)
        _draw_curves(curves, report.curves)
        _draw_bars(lengths, "tokens per verifier pass", _lengths(report), bottom=1.0)
        _draw_bars(speeds, "tokens per second", report.speeds, bottom=0.0)
        figure.suptitle(report.title, fontsize=12)
        figure.savefig(path)


def _lengths(report: Report) -> dict[str, float]:
    own = {
        name.removeprefix("val/").replace("acceptance_by_source/", "source "): value
        for name, value in report.figures.items()
        if "acceptance" in name and math.isfinite(value)
    }
    return own | {name: found["acceptance"] for name, found in report.references.items()}


def _draw_positions(axes: Axes, by_position: Mapping[str, Sequence[float]]) -> None:
    axes.set_title("rounds that accept draft k")
    for (name, shares), color in zip(by_position.items(), PALETTE, strict=False):
        places = range(1, len(shares) + 1)
        axes.plot(places, shares, marker="o", color=color, label=name)
    axes.set_xlabel("draft token k")
    axes.set_ylim(0.0, 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend_or_nothing(axes)


def _draw_curves(axes: Axes, curves: Mapping[str, Mapping[int, float]]) -> None:
    axes.set_title("speed over that without drafting")
    for (name, values), color in zip(curves.items(), PALETTE, strict=False):
        measured = name == "measured"
        style, size = ("", 9) if measured else ("-", 4)
        axes.plot(
            list(values), list(values.values()), marker="o", linestyle=style, markersize=size,
            color=color, label=name,
        )  # fmt: skip
    if curves:
        axes.axhline(1.0, color="grey", linewidth=1)
        axes.set_xlabel("drafts of a round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend_or_nothing(axes)


def _draw_bars(axes: Axes, title: str, values: Mapping[str, float], bottom: float) -> None:
    axes.set_title(title)
    if not values:
        _legend_or_nothing(axes)
        return
    names = list(values)[::-1]
    heights = [max(values[name] - bottom, 0.0) for name in names]
    axes.barh(names, heights, left=bottom, color=PALETTE[0])
    for place, name in enumerate(names):
        axes.annotate(f"{values[name]:.3g}", (max(values[name], bottom), place), va="center")


def _legend_or_nothing(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    else:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center")
