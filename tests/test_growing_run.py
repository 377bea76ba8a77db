"""The real command, while the directory it trains on is still being filled."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from eagle3.run_folder import read_json
from tests.helpers import make_document
from tests.tiny_run import TinyWorld, clean_environment, curve, make_world, write_shards

DOCUMENTS = 60
"""Each lays 13 rows, in a pack of 16 alone; 20 are a group for each rank."""
BEGUN = 45
"""More than a group of two ranks, 40 documents, so that training begins."""
TRAINED = [make_document(14, seed) for seed in range(DOCUMENTS)]
VALIDATING = [make_document(14, seed) for seed in range(100, 106)]
ARRIVING = [*TRAINED, VALIDATING[0]]
RUN = ("data.arrival=growing", "max_seq_len=16", "epochs=3")


@pytest.fixture
def world(tmp_path: Path) -> TinyWorld:
    """A capture has begun: some documents, and the mark of an unfinished directory."""
    world = make_world(tmp_path, [])
    write_shards(tmp_path / "validation", VALIDATING)
    write_shards(tmp_path / "staged", ARRIVING)
    (tmp_path / "shards" / ".capture.json").touch()
    capture(world, range(BEGUN))
    return world


def capture(world: TinyWorld, numbers: Sequence[int]) -> None:
    """Put whole files there, one after another."""
    for number in numbers:
        temporary = world.root / "shards" / f".data_{number}.tmp"
        shutil.copy(world.root / "staged" / f"data_{number}.pt", temporary)
        temporary.rename(world.root / "shards" / f"data_{number}.pt")


def train_while_captured(world: TinyWorld, *overrides: str) -> tuple[int, str]:
    """The rest of the documents exists only once a step is done; exit code and output."""
    with subprocess.Popen(
        world.command(*RUN, f"paths.val_shards={world.root / 'validation'}", *overrides),
        cwd=world.root,
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        seen = []
        for line in process.stdout:
            seen.append(line)
            if line.startswith("step 1/"):
                capture(world, range(BEGUN, len(ARRIVING)))
                (world.root / "shards" / ".capture.json").unlink()
    return process.returncode, "".join(seen)


def train(world: TinyWorld, *overrides: str) -> "subprocess.CompletedProcess[str]":
    """Nobody captures any more."""
    validation = f"paths.val_shards={world.root / 'validation'}"
    return world.run(*RUN, validation, *overrides, check=False)


@pytest.mark.ddp
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_document_is_trained_once_while_they_arrive(world: TinyWorld, ranks: int) -> None:
    code, output = train_while_captured(
        world, f"trainer.devices={ranks}", "trainer.max_steps=100", "data.arrival_timeout_s=60"
    )
    assert code == 0, output
    steps = DOCUMENTS // ranks
    (folder,) = world.run_folders()
    rows = sum(int(document.loss_mask[1:].sum()) for document in TRAINED)
    assert curve(folder, "trainer/supervised_tokens")[-1] == rows
    assert f"{DOCUMENTS + 1} documents arrived, 1 of them left out" in output
    assert f"trained in {steps} optimizer steps of at most 100" in output
    assert f"validation at step {steps}:" in output
    assert len(curve(folder, "val/acceptance_replay")) == 1
    summary = read_json(folder, "summary.json")
    assert summary["exit_reason"] == "finished"
    assert (summary["steps"], summary["total_steps"]) == (steps, 100)
    assert list(summary["references"]) == ["prompt lookup"]
    assert "data arrive while training: each document of" in output


def test_max_steps_ends_a_run_before_the_capture(world: TinyWorld) -> None:
    """Without a look at what would come next: 20 documents are a group, and 20 steps."""
    done = train(world, "trainer.max_steps=40", "data.arrival_timeout_s=5")
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = world.run_folders()
    assert read_json(folder, "summary.json")["exit_reason"] == "max_steps"
    assert "validation at step 40:" in done.stdout


@pytest.mark.ddp
def test_a_dead_writer_ends_a_run_and_leaves_its_checkpoints(world: TinyWorld) -> None:
    dead = ("trainer.devices=2", "trainer.max_steps=100", "data.arrival_timeout_s=2")
    done = train(world, *dead, "trainer.checkpoint_every_steps=5")
    assert done.returncode == 2, done.stdout + done.stderr
    shards = world.root / "shards"
    assert f"error: {shards}: found nothing new for 2 s, 45 documents so far" in done.stderr
    assert "Traceback" not in done.stderr
    (folder,) = world.run_folders()
    assert read_json(folder, "summary.json")["exit_reason"] == "error: DataError"
    checkpoint = max((folder / "checkpoints").glob("step*.ckpt"))

    (shards / ".capture.json").unlink()
    done = world.run("max_seq_len=16", f"resume={checkpoint}", check=False)
    assert done.returncode == 2
    assert "found no place in a plan" in done.stderr
