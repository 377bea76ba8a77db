"""Save a view of a W&B project: ``python -m eagle3.dashboard ENTITY/PROJECT``.

What a run logs, sorted by the questions people bring: is it good, does it learn, is the machine
busy, are the data whole. Every panel counts in optimizer steps. Runs are listed best first, with
the swept knobs beside. Each call makes another view; nothing else is touched.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eagle3.errors import ConfigError, UserError
from eagle3.run_folder import X_AXIS

KNOBS = ("lr", "epochs", "max_seq_len", "ttt_steps", "noise_std", "tokens_per_step")
FIGURES = ("best/acceptance_replay", "best/accuracy", "best/step", "start/acceptance_replay")
"""Of the summary, shown beside each run."""
TABLES = ("val/examples", "params", "preflight")


@dataclass(frozen=True)
class Panel:
    """A line plot over optimizer steps."""

    title: str
    metrics: tuple[str, ...] = ()
    """Exact names."""
    family: str | None = None
    """Instead: all names that begin so."""


def _single(*metrics: str) -> tuple[Panel, ...]:
    return tuple(Panel(metric, (metric,)) for metric in metrics)


SECTIONS: dict[str, tuple[Panel, ...]] = {
    "quality": (
        Panel("tokens per verifier pass, replayed", ("val/acceptance_replay",)),
        Panel("first draft token right", ("val/accuracy",)),
        Panel("loss per TTT step", ("train/loss", "val/loss")),
        Panel("tokens per verifier pass, pooled (too kind)", ("val/acceptance_pooled",)),
        Panel("draft tokens 0..s all right", family="val/full_acc/"),
        Panel("rounds that accept draft token s", family="val/round_acc/"),
        Panel("draft token s right, given all before", family="val/cond_acc/"),
        Panel("acceptance rate at step s", family="val/accept_rate/"),
        Panel("verifier tokens in the draft vocabulary", ("val/coverage",)),
        Panel("tokens per verifier pass, by source", family="val/acceptance_by_source/"),
        Panel("first draft token right, by source", family="val/accuracy_by_source/"),
        Panel("first draft token right, by length", family="val/accuracy_by_length/"),
    ),
    "training": (
        Panel("training loss at TTT step s", family="train/loss_step/"),
        *_single("train/accuracy", "optim/lr", "optim/grad_norm"),
        *_single("optim/clip_frac", "optim/skipped_steps"),
        Panel("size of an update over that of the weights", family="optim/update_ratio/"),
    ),
    "speed": _single(
        "perf/tokens_per_s",
        "perf/supervised_tokens_per_s",
        "perf/data_wait_frac",
        "perf/read_GBps",
        "perf/step_s_p95",
        "perf/rank_skew",
        "perf/mem_GiB",
        "perf/eta_h",
    ),
    "data": _single(
        "data/pack_fill",
        "data/supervised_frac",
        "data/bad_samples",
        "data/tokens_lost",
        "trainer/epoch",
        "trainer/supervised_tokens",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Save the view and print its address.

    Returns:
        0, or 2 for a wrong project name or a package that is missing.
    """
    parser = argparse.ArgumentParser(prog="python -m eagle3.dashboard", description=__doc__)
    parser.add_argument("project", metavar="ENTITY/PROJECT")
    parser.add_argument("--name", default="eagle3", help="of the view")
    args = parser.parse_args(arguments)
    try:
        print(build_view(args.project, args.name).save().url)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def build_view(project: str, name: str) -> Any:
    """The view, which nobody has seen yet; its ``save()`` needs the network and an API key.

    Args:
        project: ``ENTITY/PROJECT``.

    Raises:
        ConfigError: the project is not so named, or wandb-workspaces is not installed.
    """
    entity, _, title = project.partition("/")
    if not entity or not title or "/" in title:
        raise ConfigError(f"{project}: expected ENTITY/PROJECT, as in the address of the project")
    workspaces, panels = _wandb_workspaces()
    plots = {
        section: [_line_plot(panels, panel) for panel in shown]
        for section, shown in SECTIONS.items()
    }
    plots["tables"] = [panels.WeavePanelSummaryTable(table_name=table) for table in TABLES]
    axes = [panels.Config(knob) for knob in KNOBS] + [panels.SummaryMetric(FIGURES[0])]
    columns = [panels.ParallelCoordinatesPlotColumn(metric=axis) for axis in axes]
    plots["sweep"] = [panels.ParallelCoordinatesPlot(title="knobs", columns=columns)]
    pinned = [f"summary:{figure}" for figure in FIGURES] + [f"config:{knob}" for knob in KNOBS]
    best_first = workspaces.Ordering(workspaces.Summary(FIGURES[0]), ascending=False)
    return workspaces.Workspace(
        entity=entity,
        project=title,
        name=name,
        sections=[
            workspaces.Section(name=section, panels=shown, is_open=section == "quality")
            for section, shown in plots.items()
        ],
        settings=workspaces.WorkspaceSettings(x_axis=X_AXIS),
        runset_settings=workspaces.RunsetSettings(
            order=[best_first], pinned_columns=["run:displayName", *pinned]
        ),
    )


def _line_plot(panels: Any, panel: Panel) -> Any:
    if panel.family is None:
        return panels.LinePlot(title=panel.title, x=X_AXIS, y=list(panel.metrics))
    return panels.LinePlot(title=panel.title, x=X_AXIS, metric_regex=f"^{panel.family}.*")


def _wandb_workspaces() -> tuple[Any, Any]:
    """Its modules of workspaces and of panels; its import warns of its own use of pydantic."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            import wandb_workspaces.reports.v2 as panels
            import wandb_workspaces.workspaces as workspaces
        except ImportError as error:
            raise ConfigError(
                f"found no wandb-workspaces ({error}): pip install 'eagle3[dashboard]'"
            ) from error
    return workspaces, panels


if __name__ == "__main__":
    sys.exit(main())
