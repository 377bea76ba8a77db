"""Real runs that start from a trained drafter."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

from eagle3.config import Config, PathsConfig
from eagle3.provenance import job_fingerprint
from tests.tiny_run import TinyWorld, curve, last_weights, make_world, some_documents

QUICK = ("max_seq_len=32", "data.val_ratio=0.2", "val.max_seq_len=64")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    world = make_world(tmp_path_factory.mktemp("world"), some_documents(24))
    world.run(*QUICK, "epochs=2")
    return world


@pytest.fixture(scope="module")
def trained(world: TinyWorld) -> Path:
    """The last checkpoint of the first run."""
    return max((world.run_folders()[0] / "checkpoints").glob("step*.ckpt"))


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_run_begins_where_the_other_ended(world: TinyWorld, trained: Path) -> None:
    done = world.run(*QUICK, "epochs=1", f"paths.init={trained}", "paths.vocab_map=null")
    first, second = world.run_folders()[0], world.run_folders()[-1]
    scored = [row for row in rows(second) if row.get("val/loss")]
    assert float(scored[0]["trainer/global_step"]) == 0
    assert float(scored[0]["val/loss"]) == curve(first, "val/loss")[-1]
    assert curve(second, "val/accuracy")[0] == curve(first, "val/accuracy")[-1]
    assert len(scored) == 2
    assert f"vocabulary map: that of {trained}" in done.stdout
    assert "start: eagle3 checkpoint" in done.stdout
    assert f"eagle3 checkpoint {trained}" in done.stdout.split("parameter ")[1]
    assert not torch.equal(last_weights(first)["drafter.fc.weight"],
                           last_weights(second)["drafter.fc.weight"])  # fmt: skip
    summary = json.loads((second / "summary.json").read_text())
    assert summary["best/acceptance_replay"] == max(curve(second, "val/acceptance_replay"))
    assert summary["start/acceptance_replay"] == curve(first, "val/acceptance_replay")[-1]
    assert summary["references"]["start"]["accuracy"] == curve(first, "val/accuracy")[-1]
    assert "against:  start " in done.stdout


def test_a_start_that_stays_the_best_can_be_gone_on_from(world: TinyWorld, trained: Path) -> None:
    """The best is the start itself then, saved at step 0; all after it is done once more alike.

    Steps so small that no draft token changes: of large ones it depends on the rounding of a
    machine whether a drafter that guesses gets better or worse.
    """
    start = (*QUICK, "lr=1e-6", "epochs=1", f"paths.init={trained}", "paths.vocab_map=null")
    world.run(*start)
    folder = world.run_folders()[-1]
    before = (folder / "metrics.csv").read_text()
    losses = curve(folder, "train/loss"), curve(folder, "val/loss")
    best = folder / "checkpoints" / "best.ckpt"
    assert json.loads((folder / "summary.json").read_text())["best/step"] == 0, before
    done = world.run(*start, f"resume={best}")
    assert f"paths.init is not used: the run goes on from {best}" in done.stdout
    assert world.run_folders()[-1] == folder
    assert (curve(folder, "train/loss"), curve(folder, "val/loss")) == losses
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["start/acceptance_replay"] == curve(folder, "val/acceptance_replay")[0]


def test_a_start_that_does_not_fit_stops_before_training(world: TinyWorld, trained: Path) -> None:
    done = world.run(*QUICK, f"paths.init={trained}", "model.head_dim=16", check=False)
    assert done.returncode != 0
    assert "set model.head_dim=8" in done.stderr
    assert "Traceback" not in done.stderr
    smaller = (*QUICK, "paths.vocab_map=null", "model.draft_vocab_size=10")
    done = world.run(*smaller, f"paths.init={trained}", check=False)
    assert "expected model.draft_vocab_size=10: set it to 20" in done.stderr
    done = world.run(*QUICK, "paths.init=/nowhere.ckpt", check=False)
    assert "paths.init=/nowhere.ckpt does not exist" in done.stderr


def test_two_starts_are_two_jobs() -> None:
    jobs = {
        job_fingerprint(Config(paths=PathsConfig(init=init)))
        for init in (None, "a/best.ckpt", "b/best.ckpt")
    }
    assert len(jobs) == 3
