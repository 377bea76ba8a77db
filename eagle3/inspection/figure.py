"""An audit as one picture."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from eagle3.curves import PALETTE, STYLE
from eagle3.errors import DataError
from eagle3.inspection.facts import Audit

_BLUE, _GREEN, _ORANGE, _RED = PALETTE[:4]
_PALE = "#c9d7e8"


def draw_audit(audit: Audit, path: Path) -> None:
    """Write a PNG with four panels: lengths, supervised shares, packing, logit lens.

    Raises:
        DataError: the file cannot be written.
    """
    found = audit.contents
    with mpl.rc_context({**STYLE, "axes.axisbelow": True}):
        figure = Figure(figsize=(12, 8), dpi=110, layout="constrained")
        FigureCanvasAgg(figure)
        lengths, shares, packing, lens = figure.subplots(2, 2).ravel()
        _draw_lengths(lengths, audit)
        _draw_shares(shares, audit)
        _draw_packing(packing, audit)
        _draw_lens(lens, audit)
        name = Path(audit.directory.path).name
        figure.suptitle(f"{name}: {found.documents:,} documents, {found.tokens:,} tokens")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, format="png")
        except OSError as error:
            raise DataError(
                f"{path}: cannot be written ({error}). Give --figure another path."
            ) from error


def _draw_lengths(axes: Axes, audit: Audit) -> None:
    lengths = audit.contents.lengths
    bins = lengths.histogram
    axes.set_title("tokens of a document")
    axes.bar(
        [one.low for one in bins],
        [one.documents for one in bins],
        width=[one.high - one.low for one in bins],
        align="edge",
        color=_BLUE,
        edgecolor="white",
    )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(_thousands)
    for name, value, style in (("p50", lengths.p50, "--"), ("p99", lengths.p99, ":")):
        axes.axvline(value, color=_RED, linestyle=style, label=f"{name} {value:,.0f}")
    _count_documents(axes)


def _draw_shares(axes: Axes, audit: Audit) -> None:
    found = audit.contents.supervision
    width = 1 / len(found.share_histogram)
    axes.set_title("supervised share of a document")
    axes.bar(
        [k * width for k in range(len(found.share_histogram))],
        found.share_histogram,
        width=width,
        align="edge",
        color=_GREEN,
        edgecolor="white",
    )
    axes.axvline(found.share, color=_RED, linestyle="--", label=f"all tokens {found.share:.1%}")
    axes.set_xlim(0, 1)
    _count_documents(axes)


def _draw_packing(axes: Axes, audit: Audit) -> None:
    found = audit.packing
    places = range(len(found))
    axes.set_title("rows of a pack")
    supervised = [p.fill * p.supervised_share for p in found]
    twice = [p.fill * p.overhead_share for p in found]
    other = [p.fill * (1 - p.supervised_share - p.overhead_share) for p in found]
    axes.bar(places, supervised, color=_BLUE, label="supervised")
    axes.bar(places, other, bottom=supervised, color=_PALE, label="not supervised")
    below = [a + b for a, b in zip(supervised, other, strict=True)]
    axes.bar(places, twice, bottom=below, color=_ORANGE, label="laid twice")
    for place, packing in zip(places, found, strict=True):
        text, top = f"fill {packing.fill:.2%}", (place, packing.fill)
        axes.annotate(text, top, ha="center", va="bottom", fontsize=8)
    axes.set_xticks(places, [f"{p.max_seq_len:,}" for p in found])
    axes.set_xlabel("max_seq_len")
    axes.set_ylim(0, 1.1)
    axes.legend(fontsize=8, loc="lower right")


def _count_documents(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(_thousands)
    axes.set_ylabel("documents")
    axes.legend(fontsize=8, loc="upper left")


def _thousands(value: float, _: float) -> str:
    return f"{value:,.0f}"


def _draw_lens(axes: Axes, audit: Audit) -> None:
    axes.set_title("logit lens: same argmax as the last state")
    found = audit.agreement
    if found is None:
        axes.text(0.5, 0.5, "no verifier given", transform=axes.transAxes, ha="center")
        return
    names = [layer.name for layer in audit.states.layers]
    axes.plot(names, [*found.lens, 1.0], color=_BLUE, marker="o", label="agreement")
    axes.axhline(
        found.on_policy,
        color=_GREEN,
        linewidth=1,
        linestyle="--",
        label=f"on-policy {found.on_policy:.1%}",
    )
    axes.set_ylim(0, 1.05)
    axes.legend(fontsize=8)
