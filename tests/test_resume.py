"""A run that was killed goes on with the packs it would have trained."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests.tiny_run import TinyWorld, clean_environment, make_world, some_documents

RUN = (
    "max_seq_len=16",
    "epochs=2",
    "noise_std=0.1",
    "data.num_workers=2",
    "trainer.checkpoint_every_steps=3",
    "optim.schedule=constant",
)
DOCUMENTS = 24
"""One to a pack of 16 rows: two epochs of 24 packs, less the validation."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    return make_world(tmp_path_factory.mktemp("world"), some_documents(DOCUMENTS))


@pytest.fixture(scope="module")
def whole(world: TinyWorld) -> dict[int, float]:
    """Losses of the uninterrupted run on one rank."""
    world.run(*RUN)
    return losses(world.run_folders()[-1])


def losses(folder: Path) -> dict[int, float]:
    """Training loss by optimizer step."""
    with (folder / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("train/loss")]
    return {int(float(row["trainer/global_step"])): float(row["train/loss"]) for row in rows}


def train_and_kill(world: TinyWorld, *overrides: str, after: int) -> Path:
    """Kill all processes of a run as soon as a checkpoint of ``after`` steps or more is there."""
    before = set(world.run_folders())
    process = subprocess.Popen(
        world.command(*RUN, *overrides),
        cwd=world.root,
        env=clean_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            assert process.poll() is None, "the run ended before it was killed"
            for folder in set(world.run_folders()) - before:
                found = sorted((folder / "checkpoints").glob("recent*.ckpt"))
                if found and steps_of(found[-1]) >= after:
                    return found[-1]
            time.sleep(0.005)
        raise AssertionError("no checkpoint within two minutes")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def steps_of(checkpoint: Path) -> int:
    return int(checkpoint.stem.removeprefix("recent"))


def go_on_and_compare(world: TinyWorld, whole: dict[int, float], ranks: str, after: int) -> None:
    """Kill a run, continue it, and see the losses of the uninterrupted run."""
    checkpoint = train_and_kill(world, ranks, after=after)
    done = steps_of(checkpoint)
    position = torch.load(checkpoint, weights_only=True)["ShardDataModule"]
    steps = len(whole) // 2
    assert (position["epoch"], position["step"]) == (done // steps, done % steps)
    assert position["step"], "the run was killed within an epoch"
    world.run(*RUN, ranks, f"resume={checkpoint}")
    rest = losses(world.run_folders()[-1])
    assert rest == {step: loss for step, loss in whole.items() if step > done}


def test_a_killed_run_goes_on_with_the_same_packs(
    world: TinyWorld, whole: dict[int, float]
) -> None:
    go_on_and_compare(world, whole, "trainer.devices=1", after=24)


@pytest.mark.ddp
def test_killed_ranks_go_on_with_the_same_packs(world: TinyWorld) -> None:
    world.run(*RUN, "trainer.devices=2")
    whole = losses(world.run_folders()[-1])
    go_on_and_compare(world, whole, "trainer.devices=2", after=6)


def test_a_checkpoint_of_an_epochs_end_goes_on_with_the_next(
    world: TinyWorld, whole: dict[int, float]
) -> None:
    world.run(*RUN, "epochs=1")
    (ended,) = (world.run_folders()[-1] / "checkpoints").glob("step*.ckpt")
    world.run(*RUN, f"resume={ended}")
    rest = losses(world.run_folders()[-1])
    assert rest == {step: loss for step, loss in whole.items() if step > len(whole) // 2}


def test_other_documents_and_other_plans_are_refused(tmp_path: Path) -> None:
    documents = some_documents(10)
    world = make_world(tmp_path, documents)
    world.run(*RUN, "trainer.max_steps=4")
    (checkpoint,) = (world.run_folders()[-1] / "checkpoints").glob("recent*.ckpt")
    position = torch.load(checkpoint, weights_only=True)["ShardDataModule"]

    done = world.run(*RUN, "max_seq_len=32", f"resume={checkpoint}", check=False)
    assert done.returncode == 2
    assert f"the plan of epoch 0 changed: the checkpoint was trained with {position['plan']}" in (
        done.stderr
    )
    assert "max_seq_len" in done.stderr

    make_world(tmp_path, [*documents, *some_documents(12)[-1:]])
    done = world.run(*RUN, f"resume={checkpoint}", check=False)
    assert done.returncode == 2
    assert f"trained on fingerprint {position['data']}, found" in done.stderr
    assert "data.on_change=accept" in done.stderr
    world.run(*RUN, f"resume={checkpoint}", "data.on_change=accept", "trainer.max_steps=6")
