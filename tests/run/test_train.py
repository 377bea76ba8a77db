"""The real command, with real processes: sweeps, ranks of its own, torchrun, nohup."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3.compose import load_config
from eagle3.run_folder import read_json
from tests.run.wandb_file import read_offline_run
from tests.tiny_run import TinyWorld, clean_environment, make_world, some_documents

pytestmark = pytest.mark.ddp

SWEEP_FILES = {f"sweep_summary.{ending}" for ending in ("csv", "md", "png")}
SHORT = ("max_seq_len=16", "epochs=1", "data.val_ratio=0.3")


@pytest.fixture
def world(tmp_path: Path) -> TinyWorld:
    return make_world(tmp_path, some_documents(12))


def assert_finished(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    assert {"config.yaml", "provenance.json", "metrics.csv", "curves.png", "summary.json"} <= names
    assert len(list(folder.rglob("config.yaml"))) == 1
    assert read_json(folder, "summary.json")["exit_reason"] == "finished"


def only_known_folders(world: TinyWorld) -> None:
    """Neither Hydra nor Lightning made folders of their own where the command was given."""
    made = {path.name for path in world.root.iterdir()}
    assert made <= {"verifier", "shards", "vocab.safetensors", "runs", "cache", "nohup.out"}


def test_a_sweep_of_two_jobs_on_two_ranks_each(world: TinyWorld) -> None:
    world.run("-m", "seed=1,2", "trainer.devices=2", *SHORT)
    (sweep,) = (world.root / "runs").iterdir()
    jobs = sorted(path for path in sweep.iterdir() if path.is_dir())
    names = {path.name for path in sweep.iterdir()}
    assert names == {"multirun.yaml", *SWEEP_FILES, *(job.name for job in jobs)}
    assert len(jobs) == 2
    for job in jobs:
        assert_finished(job)
        assert "=" not in "".join(path.name for path in job.rglob("*"))
    assert sorted(load_config(job / "config.yaml").seed for job in jobs) == [1, 2]
    ids = {read_json(job, "provenance.json")["id"] for job in jobs}
    assert len(ids) == 2
    assert {read_json(job, "provenance.json")["group"] for job in jobs} == {sweep.name}
    only_known_folders(world)


def test_a_job_that_fails_does_not_take_the_next_one_along(world: TinyWorld) -> None:
    done = world.run("-m", "lr=-1.0,1e-2", *SHORT, check=False)
    assert done.returncode == 2
    assert "error: lr=-1.0" in done.stderr
    assert "Traceback" not in done.stderr
    (sweep,) = (world.root / "runs").iterdir()
    (job,) = (path for path in sweep.iterdir() if path.is_dir())
    assert_finished(job)
    assert f"sweep:    {sweep / 'sweep_summary.md'}" in done.stdout
    assert "best: `lr=0.01`: " in done.stdout
    with (sweep / "sweep_summary.csv").open() as file:
        finished, failed = csv.DictReader(file)
    best = read_json(job, "summary.json")["best/acceptance_replay"]
    assert finished["run"] == job.name
    assert float(finished["best/acceptance_replay"]) == best
    assert (failed["run"], failed["lr"]) == ("job 0", "-1.0")
    assert failed["exit_reason"] == "error: ConfigError"
    assert "lr=-1.0" in failed["message"]


def torchrun(world: TinyWorld, *overrides: str) -> subprocess.CompletedProcess[str]:
    """A run whose ranks torchrun starts, in the only run folder."""
    train = world.command("trainer.devices=2", *SHORT, *overrides)
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    port = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    done = subprocess.run(
        [*start, *port, *train[1:]],
        capture_output=True,
        text=True,
        check=False,
        cwd=world.root,
        env=clean_environment(),
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = world.run_folders()
    assert_finished(folder)
    only_known_folders(world)
    return done


def test_torchrun_is_the_same_run_and_goes_on_in_its_folder(world: TinyWorld) -> None:
    assert "begins anew" in torchrun(world, "resume=auto").stdout
    (folder,) = world.run_folders()
    metrics = (folder / "metrics.csv").read_bytes()
    (folder / "summary.json").unlink()
    assert f"{folder} goes on after step 4" in torchrun(world, "resume=auto").stdout
    assert (folder / "metrics.csv").read_bytes() == metrics


def test_a_mistake_that_ranks_find_keeps_its_code_and_has_no_traceback(world: TinyWorld) -> None:
    missing = f"paths.shards={world.root / 'nowhere'}"
    done = world.run("trainer.devices=2", missing, *SHORT, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr


def run_and_signal(world: TinyWorld, signum: int, command: list[str]) -> tuple[int, str]:
    """Send a signal to a run at its second step; exit code and output."""
    with subprocess.Popen(
        command,
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
            if line.startswith("step 2/"):
                process.send_signal(signum)
    return process.returncode, "".join(seen)


def test_nohup_keeps_a_run_with_wandb_when_the_terminal_goes(world: TinyWorld) -> None:
    command = ["nohup", *world.command("logger.wandb=offline", *SHORT)]
    code, output = run_and_signal(world, signal.SIGHUP, command)
    assert code == 0, output
    assert "\nnext:" in output
    (folder,) = world.run_folders()
    assert read_offline_run(folder).exit_code == 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1], ids=lambda s: s.name)
def test_a_signal_ends_a_saved_run_and_its_sweep(world: TinyWorld, signum: signal.Signals) -> None:
    """With the code that schedulers take for "try again"; the second job does not begin."""
    long = world.command("-m", "seed=1,2", *SHORT, "epochs=5000", "trainer.max_steps=5000")
    code, output = run_and_signal(world, signum, long)
    assert code == os.EX_TEMPFAIL == 75, output
    assert "training: interrupted after" in output
    (job,) = (world.root / "runs").glob("sweep_*/tiny_*")
    assert f"resume={job}/checkpoints/step" in output
