"""Runs that are killed or stopped, in real processes, end as those that nothing happened to."""

from __future__ import annotations

import csv
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.tiny_run import TinyWorld, clean_environment, last_weights, make_world, some_documents

RUN = (
    "max_seq_len=16",
    "epochs=2",
    "noise_std=0.1",
    "data.num_workers=2",
    "trainer.checkpoint_every_steps=3",
    "val.every_steps=7",
)
DOCUMENTS = 24
"""One to a pack of 16 rows: two epochs of 24 packs, less the validation."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    return make_world(tmp_path_factory.mktemp("world"), some_documents(DOCUMENTS))


@pytest.fixture(scope="module")
def whole(world: TinyWorld) -> Path:
    """The uninterrupted run on one rank."""
    world.run(*RUN)
    return world.run_folders()[-1]


def rows(folder: Path) -> list[dict[str, str]]:
    """``metrics.csv`` without what a clock has measured."""
    with (folder / "metrics.csv").open() as file:
        found = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in found]


def losses(folder: Path) -> dict[int, float]:
    """Training loss by optimizer step."""
    logged = [row for row in rows(folder) if row.get("train/loss")]
    return {int(float(row["trainer/global_step"])): float(row["train/loss"]) for row in logged}


def assert_same_run(folder: Path, whole: Path) -> None:
    """Every metric at every step, the final weights to the bit, and the best."""
    assert rows(folder) == rows(whole)
    weights, expected = last_weights(folder), last_weights(whole)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())
    best, of_whole = (torch.load(f / "checkpoints" / "best.ckpt") for f in (folder, whole))
    assert best["global_step"] == of_whole["global_step"]


def session(leader: int) -> Iterator[int]:
    """Ids of all processes that ``leader`` and its descendants have started, itself included."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == leader:
            yield int(entry.name)


def signal_all(leader: int, signum: int) -> None:
    for pid in session(leader):
        os.kill(pid, signum)


@contextmanager
def training(world: TinyWorld, *overrides: str) -> Iterator[subprocess.Popen[bytes]]:
    """A run with ``resume=auto`` in a session of its own, killed in the end if it still lives."""
    process = subprocess.Popen(
        world.command(*RUN, "resume=auto", *overrides),
        cwd=world.root,
        env=clean_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        signal_all(process.pid, signal.SIGKILL)
        process.wait()


def wait_until(process: subprocess.Popen[bytes], reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not reached():
        assert process.poll() is None, "the run ended before it was killed"
        assert time.monotonic() < deadline, "not reached within two minutes"
        time.sleep(0.0005)


def logged(world: TinyWorld) -> int:
    """Rows that the newest run has logged."""
    files = [folder / "metrics.csv" for folder in world.run_folders()[-1:]]
    return sum(file.read_bytes().count(b"\n") - 1 for file in files if file.is_file())


def kill_at_row(world: TinyWorld, row: int, *overrides: str) -> Path:
    """SIGKILL to all processes as soon as ``row`` rows are logged; the run folder."""
    with training(world, *overrides) as process:
        wait_until(process, lambda: logged(world) >= row)
        signal_all(process.pid, signal.SIGKILL)
    (folder,) = world.run_folders()
    return folder


def kill_in_a_write(world: TinyWorld, row: int, *overrides: str) -> None:
    """SIGKILL while a checkpoint is written, after ``row`` rows; its temporary file is left."""
    (folder,) = world.run_folders()

    def writes() -> bool:
        """Stopped with a part of a checkpoint on disk."""
        if logged(world) < row or not any((folder / "checkpoints").glob(".*.ckpt.tmp")):
            return False
        signal_all(process.pid, signal.SIGSTOP)
        time.sleep(0.01)
        if any((folder / "checkpoints").glob(".*.ckpt.tmp")):
            return True
        signal_all(process.pid, signal.SIGCONT)
        return False

    with training(world, *overrides) as process:
        wait_until(process, writes)
    assert any((folder / "checkpoints").glob(".*.ckpt.tmp"))


def test_a_killed_run_goes_on_with_the_same_packs(tmp_path: Path, whole: Path) -> None:
    """Killed three times, its newest checkpoint cut, its data moved: the run that was never."""
    points = random.Random(5)
    world = make_world(tmp_path, some_documents(DOCUMENTS))
    folder = kill_at_row(world, points.randint(9, 16))
    newest = max((folder / "checkpoints").glob("step*.ckpt"))
    os.truncate(newest, newest.stat().st_size * 2 // 3)
    (tmp_path / "shards").rename(tmp_path / "moved")
    moved = f"paths.shards={tmp_path / 'moved'}"
    kill_at_row(world, points.randint(18, 25), moved)
    kill_in_a_write(world, points.randint(28, 34), moved)
    done = world.run(*RUN, "resume=auto", moved)
    assert f"resume=auto: {folder} goes on after step" in done.stdout
    assert world.run_folders() == [folder]
    assert not list((folder / "checkpoints").glob(".*"))
    assert_same_run(folder, whole)


def rank_process(launcher: int, rank: int) -> int:
    """Process id of a rank that ``launcher`` has started."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    environments = {c: Path(f"/proc/{c}/environ").read_bytes().split(b"\0") for c in children}
    (found,) = [c for c, variables in environments.items() if f"RANK={rank}".encode() in variables]
    return int(found)


def slurm(folder: Path) -> dict[str, str]:
    """Variables of a Slurm job of one task, and a ``scontrol`` that notes what it is asked."""
    scontrol = folder / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\n')
    scontrol.chmod(0o755)
    task = {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    path = f"{scontrol.parent}{os.pathsep}{os.environ['PATH']}"
    return {"SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "train", "PATH": path, **task}


@pytest.mark.ddp
def test_stopped_and_killed_ranks_go_on_with_the_same_packs(
    world: TinyWorld, tmp_path: Path
) -> None:
    """SIGTERM to the second rank alone, in a Slurm job; then SIGKILL to everything."""
    two = ("trainer.devices=2", "tokens_per_step=64")
    world.run(*RUN, *two)
    whole = world.run_folders()[-1]
    world = make_world(tmp_path, some_documents(DOCUMENTS))
    with subprocess.Popen(
        world.command(*RUN, *two, "resume=auto"),
        cwd=world.root,
        env=clean_environment() | slurm(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        wait_until(process, lambda: logged(world) >= 2)
        os.kill(rank_process(process.pid, 1), signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == os.EX_TEMPFAIL == 75, output
    assert "training: interrupted after" in output
    assert "stopped by a signal, all is saved (exit code 75)" in output
    assert (tmp_path / "asked").read_text() == "requeue 77\n"
    done = logged(world)
    assert done < len(rows(whole)) - 2
    folder = kill_at_row(world, done + 2, *two)
    world.run(*RUN, *two, "resume=auto")
    assert world.run_folders() == [folder]
    assert_same_run(folder, whole)


def test_a_checkpoint_of_an_epochs_end_goes_on_with_the_next(world: TinyWorld, whole: Path) -> None:
    """Under a constant rate, as with one epoch's plan the cosine would be another."""
    constant = "optim.schedule=constant"
    world.run(*RUN, constant)
    expected = losses(world.run_folders()[-1])
    world.run(*RUN, constant, "epochs=1")
    ended = max((world.run_folders()[-1] / "checkpoints").glob("step*.ckpt"))
    world.run(*RUN, constant, f"resume={ended}")
    rest = losses(world.run_folders()[-1])
    assert rest == {step: loss for step, loss in expected.items() if step > len(expected) // 2}


def test_a_run_that_a_signal_stopped_at_its_end_only_reports(world: TinyWorld, whole: Path) -> None:
    """From its last checkpoint nothing is left to train."""
    before = rows(whole)
    last = max((whole / "checkpoints").glob("step*.ckpt"))
    done = world.run(*RUN, f"resume={last}")
    assert "training: finished after 40 of 40 steps" in done.stdout
    assert rows(whole) == before


def test_other_documents_and_other_plans_are_refused(tmp_path: Path) -> None:
    documents = some_documents(10)
    world = make_world(tmp_path, documents)
    world.run(*RUN, "trainer.max_steps=4")
    checkpoint = max((world.run_folders()[-1] / "checkpoints").glob("step*.ckpt"))
    position = torch.load(checkpoint, weights_only=True)["ShardDataModule"]
    assert (position["epoch"], position["step"]) == (0, 4)

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
