"""The dashboard's view: every name that a real run logs has its panel, and no other name has."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from eagle3.dashboard import FIGURES, KNOBS, SECTIONS, TABLES, build_view, main
from eagle3.run_folder import X_AXIS
from tests.run.wandb_file import read_offline_run
from tests.tiny_run import clean_environment, make_world, some_documents, write_shards

PANELS = [panel for panels in SECTIONS.values() for panel in panels]
AXES = {X_AXIS, "step", "epoch"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run on two ranks, with two directories, started from a drafter."""
    world = make_world(tmp_path_factory.mktemp("world"), some_documents(30))
    write_shards(world.root / "more", some_documents(45)[30:])
    common = ("max_seq_len=32", "data.val_ratio=0.3", "epochs=1")
    world.run(*common)
    first = max((world.run_folders()[0] / "checkpoints").glob("step*.ckpt"))
    parts = ", ".join(f"{{path: {world.root / name}, weight: 1}}" for name in ("shards", "more"))
    world.run(
        *common,
        "trainer.devices=2",
        "paths.shards=null",
        f"data.mixture=[{parts}]",
        f"paths.init={first}",
        "logger.wandb=offline",
    )
    return world.run_folders()[-1]


@pytest.fixture(scope="module")
def names(folder: Path) -> set[str]:
    with (folder / "metrics.csv").open() as file:
        return set(next(csv.reader(file))) - AXES


def panels_of(name: str) -> list[str]:
    """Titles of the panels that show a metric."""
    return [
        panel.title
        for panel in PANELS
        if name in panel.metrics or (panel.family is not None and name.startswith(panel.family))
    ]


def test_every_logged_name_has_one_panel(names: set[str]) -> None:
    shown = {name: panels_of(name) for name in names}
    assert {name: titles for name, titles in shown.items() if len(titles) != 1} == {}


def test_no_panel_waits_for_a_name_that_nobody_logs(names: set[str]) -> None:
    exact = {metric for panel in PANELS for metric in panel.metrics}
    assert exact - names == set()
    families = {panel.family for panel in PANELS if panel.family is not None}
    assert {family for family in families if not any(n.startswith(family) for n in names)} == set()


def test_figures_knobs_and_tables_are_those_of_the_run(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    assert set(FIGURES) <= summary.keys()
    assert set(KNOBS) <= yaml.safe_load((folder / "config.yaml").read_text()).keys()
    logged = {name for row in read_offline_run(folder).history for name in row}
    assert {table for table in TABLES if not any(n.startswith(table) for n in logged)} == set()


def test_the_preflight_is_a_table_of_the_run(folder: Path) -> None:
    (path,) = folder.glob("wandb/offline-run-*/files/media/table/preflight_*.table.json")
    table = json.loads(path.read_text())
    assert table["columns"] == ["verdict", "topic", "found", "action"]
    found = {row[1]: row for row in table["data"]}
    assert {"memory", "disk", "steps", "parameters", "coverage"} <= found.keys()
    assert found["steps"][0] == "ok"
    assert "an epoch" in found["steps"][2]


def dumped(view: Any) -> dict[str, Any]:
    """What would be sent."""
    content: dict[str, Any] = json.loads(view._to_model().model_dump_json())
    return content["spec"]["section"]


def plots(section: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for part in section["panel_bank_config"]["sections"]:
        yield from (p["config"] for p in part["panels"] if p["view_type"].endswith("Line Plot"))


def test_the_view_holds_every_panel_over_optimizer_steps() -> None:
    section = dumped(build_view("team/drafters", "mine"))
    found = {plot["chart_title"]: plot for plot in plots(section)}
    assert list(found) == [panel.title for panel in PANELS]
    assert {plot["x_axis"] for plot in found.values()} == {X_AXIS}
    for panel in PANELS:
        plot = found[panel.title]
        assert tuple(plot["metrics"]) == panel.metrics
        assert plot["metric_regex"] == (None if panel.family is None else f"^{panel.family}.*")
    parts = section["panel_bank_config"]["sections"]
    assert [part["name"] for part in parts] == [*SECTIONS, "tables", "sweep"]
    assert [part["is_open"] for part in parts] == [True] + [False] * (len(parts) - 1)
    (order,) = section["run_sets"][0]["sort"]["keys"]
    assert (order["key"]["name"], order["ascending"]) == ("best/acceptance_replay", False)


@pytest.mark.parametrize("project", ["drafters", "/drafters", "team/", "a/b/c"])
def test_a_project_is_named_with_its_entity(
    project: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([project]) == 2
    assert f"{project}: expected ENTITY/PROJECT" in capsys.readouterr().err


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "wandb_workspaces.py").write_text("raise ImportError('not here')\n")
    done = subprocess.run(
        [sys.executable, "-m", "eagle3.dashboard", "team/drafters"],
        capture_output=True,
        text=True,
        check=False,
        env=clean_environment() | {"PYTHONPATH": str(tmp_path)},
        timeout=120,
    )
    assert done.returncode == 2
    assert "pip install 'eagle3[dashboard]'" in done.stderr
    assert "Traceback" not in done.stderr
