"""The curves of a run as one picture: loss, accuracy and acceptance over optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from eagle3.run_folder import X_AXIS, Rows, series

References = Mapping[str, Mapping[str, float]]
"""Cheap drafters on the same rows: name -> {"accuracy": ..., "acceptance": ...}."""

_TRAIN, _VALIDATION = "#9aa5b1", "#1f5fa8"
PALETTE = ("#1f5fa8", "#2a9d8f", "#e9a03b", "#d1495b", "#7d5ba6", "#5c6b73", "#b56576")
_REFERENCE = "#444444"
_START = {"loss": "val/loss", "accuracy": "val/accuracy", "acceptance": "val/acceptance_replay"}
_LABEL_GAP = 0.02
"""Relative distance of lines below which their labels would overprint."""
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "legend.framealpha": 0.9,
    "legend.edgecolor": "none",
    "font.size": 10,
}


def draw_curves(rows: Rows, path: Path, *, title: str, references: References) -> None:
    """Write a PNG with three panels; panels without data say so.

    A drafter that was scored before its first step is drawn as a reference too.

    Args:
        rows: as :func:`eagle3.run_folder.read_metrics` returns them.
        references: accuracy and acceptance length of cheap drafters, drawn as dashed lines.
    """
    references = {**start_reference(rows), **references}
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(15, 4.8), dpi=110, layout="constrained")
        FigureCanvasAgg(figure)
        loss, accuracy, acceptance = figure.subplots(1, 3)
        _draw_loss(loss, rows)
        _draw_accuracy(accuracy, rows)
        _draw_acceptance(acceptance, rows)
        _draw_references(loss, references, "loss")
        _draw_references(accuracy, references, "accuracy")
        _draw_references(acceptance, references, "acceptance")
        for axes, bottom in ((loss, None), (accuracy, 0.0), (acceptance, 1.0)):
            _finish(axes, bottom)
        figure.suptitle(title, fontsize=12)
        figure.savefig(path)


def start_reference(rows: Rows) -> dict[str, dict[str, float]]:
    """The drafter before its first step, by the name ``start``; empty where it was not scored."""
    for row in rows:
        found = {figure: row.get(name, math.nan) for figure, name in _START.items()}
        if row[X_AXIS] == 0 and all(map(math.isfinite, found.values())):
            return {"start": found}
    return {}


def _draw_loss(axes: Axes, rows: Rows) -> None:
    axes.set_title("loss, mean per draft step")
    _plot(axes, rows, "train/loss", color=_TRAIN, linewidth=1, label="train")
    _plot(axes, rows, "val/loss", color=_VALIDATION, marker="o", label="validation")


def _draw_accuracy(axes: Axes, rows: Rows) -> None:
    axes.set_title("rows right up to draft token k")
    _plot(axes, rows, "train/accuracy", color=_TRAIN, linewidth=1, label="train, k = 1")
    names = sorted({key for row in rows for key in row if key.startswith("val/full_acc/")})
    for index, name in enumerate(names):
        label = f"validation, k = {int(name.rsplit('/', 1)[1]) + 1}"
        _plot(axes, rows, name, color=PALETTE[index % len(PALETTE)], marker="o", label=label)


def _draw_acceptance(axes: Axes, rows: Rows) -> None:
    axes.set_title("tokens per verifier pass")
    for name, label, color in (
        ("val/acceptance_replay", "replay (trust this one)", _VALIDATION),
        ("val/acceptance_pooled", "pooled", PALETTE[2]),
    ):
        _plot(axes, rows, name, color=color, marker="o", label=label)


def _plot(axes: Axes, rows: Rows, name: str, **style: Any) -> None:
    steps, values = series(rows, name)
    if steps:
        axes.plot(steps, values, markersize=4, **style)


def _draw_references(axes: Axes, references: References, figure: str) -> None:
    values = {name: found[figure] for name, found in references.items() if figure in found}
    for label, value in _labels(values):
        axes.annotate(
            label,
            (1.0, value),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            fontsize=8,
            color=_REFERENCE,
        )
    for value in values.values():
        axes.axhline(value, color=_REFERENCE, linewidth=1, linestyle="--")


def _labels(values: Mapping[str, float]) -> list[tuple[str, float]]:
    """One label a line; lines too close for two labels share one, at the highest of them."""
    labels: list[tuple[str, float]] = []
    for name, value in sorted(values.items(), key=lambda item: item[1]):
        if labels and value - labels[-1][1] < _LABEL_GAP * value:
            labels[-1] = (f"{labels[-1][0]}, {name}", value)
        else:
            labels.append((name, value))
    return labels


def _finish(axes: Axes, bottom: float | None) -> None:
    axes.set_xlabel("optimizer steps")
    if axes.get_legend_handles_labels()[0]:
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=bottom)
        axes.legend(fontsize=8)
    else:
        axes.text(0.5, 0.5, "nothing logged", transform=axes.transAxes, ha="center")
