"""A comparison of runs as one picture: all curves, then a panel for each knob."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from eagle3.curves import PALETTE, STYLE
from eagle3.reporting.comparison import Comparison, Setting, as_override
from eagle3.reporting.jobs import ACCEPTANCE, JobResult
from eagle3.run_folder import series

_COLUMNS = 3
_MAX_LABELS = 10
"""Lines that a legend still tells apart."""
_LOG_RATIO = 9.0
"""Largest over smallest value from which a knob's axis is logarithmic."""
_CUT_SHORT = "#9aa5b1"


def draw_comparison(comparison: Comparison, path: Path, *, title: str) -> None:
    """Write a PNG; a panel without anything measured says so."""
    count = 1 + len(comparison.knobs)
    columns = min(count, _COLUMNS)
    lines = math.ceil(count / columns)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.5 * columns, 4.4 * lines), dpi=110, layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(lines, columns, squeeze=False).ravel()
        _draw_curves(panels[0], comparison)
        for axes, knob in zip(panels[1:count], comparison.knobs, strict=True):
            _draw_knob(axes, comparison, knob)
        for axes in panels[count:]:
            axes.set_axis_off()
        figure.suptitle(title, fontsize=12)
        figure.savefig(path)


def _draw_curves(axes: Axes, comparison: Comparison) -> None:
    """Best setting first in the colours and in front; grey and dashed: cut short."""
    axes.set_title("tokens per verifier pass, all runs")
    axes.set_xlabel("optimizer steps")
    for job in comparison.cut_short:
        _curve(axes, job, color=_CUT_SHORT, linestyle="--", zorder=1)
    for index, setting in enumerate(comparison.settings):
        for number, job in enumerate(setting.jobs):
            label = setting.override_line if number == 0 else None
            _curve(axes, job, color=_color(index), label=label, zorder=2 - index / 1000)
    _legend(axes, len(comparison.settings) if comparison.knobs else 0)


def _curve(axes: Axes, job: JobResult, **style: Any) -> None:
    steps, lengths = series(job.rows, ACCEPTANCE)
    if steps:
        axes.plot(steps, lengths, marker="o", markersize=3, linewidth=1.3, **style)


def _draw_knob(axes: Axes, comparison: Comparison, knob: str) -> None:
    """One line for each combination of the other knobs; bars are the deviation over seeds."""
    axes.set_title(knob)
    axes.set_ylabel("best tokens per verifier pass")
    groups = lines_along(comparison.settings, knob)
    positions = _positions(axes, [setting.values[knob] for setting in comparison.settings])
    for index, (label, settings) in enumerate(groups.items()):
        settings = sorted(settings, key=lambda s: positions[as_override(s.values[knob])])
        places = [positions[as_override(setting.values[knob])] for setting in settings]
        axes.errorbar(
            places,
            [setting.mean for setting in settings],
            yerr=[setting.deviation or 0.0 for setting in settings],
            color=_color(index),
            marker="o",
            capsize=3,
            label=label,
        )
        for place, setting in zip(places, settings, strict=True):
            if len(setting.lengths) > 1:
                seeds = [place] * len(setting.lengths)
                axes.scatter(seeds, setting.lengths, s=10, color=_color(index), alpha=0.5)
    _legend(axes, len(groups) if len(comparison.knobs) > 1 else 0)


def lines_along(settings: Sequence[Setting], knob: str) -> dict[str, list[Setting]]:
    """Settings that differ in ``knob`` only, under the values of the other knobs."""
    groups: dict[str, list[Setting]] = {}
    for setting in settings:
        others = {key: value for key, value in setting.values.items() if key != knob}
        label = " ".join(f"{key}={as_override(value)}" for key, value in others.items())
        groups.setdefault(label, []).append(setting)
    return groups


def _positions(axes: Axes, values: Sequence[Any]) -> Mapping[str, float]:
    """Where the values of a knob stand on the x-axis; numbers to scale, anything else in a row."""
    named = {as_override(value): value for value in values}
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in named.values()):
        named = dict(sorted(named.items(), key=lambda item: item[1]))
        positions = {name: float(value) for name, value in named.items()}
        smallest, largest = (f(positions.values(), default=0.0) for f in (min, max))
        if smallest > 0 and largest / smallest >= _LOG_RATIO:
            axes.set_xscale("log")
    else:
        positions = {name: float(index) for index, name in enumerate(sorted(named))}
    axes.set_xticks(list(positions.values()), list(positions))
    axes.minorticks_off()
    return positions


def _legend(axes: Axes, lines: int) -> None:
    if not axes.lines:
        axes.text(0.5, 0.5, "nothing measured", transform=axes.transAxes, ha="center")
    elif 0 < lines <= _MAX_LABELS:
        axes.legend(fontsize=8)


def _color(index: int) -> str:
    return PALETTE[index % len(PALETTE)]
