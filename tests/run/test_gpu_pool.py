"""Pools as real processes: disjoint cards, failures, signals, and ranks inside of jobs."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.errors import ConfigError
from eagle3.pool.devices import Devices, FreeDevices, find_devices
from eagle3.pool.job import PoolJob
from eagle3.pool.running import remaining_s
from eagle3.run_folder import read_failed_jobs, read_json
from tests.tiny_run import clean_environment, make_world, some_documents

pytestmark = pytest.mark.ddp

REPOSITORY = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    own = clean_environment() | {"PYTHONPATH": str(REPOSITORY)}
    return {k: v for k, v in own.items() if k not in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")}


def sweep_command(folder: Path, *overrides: str) -> list[str]:
    start = [sys.executable, "-m", "tests.run.pool_command", "-m", "hydra/launcher=gpu_pool"]
    return [*start, f"paths.output={folder}", *overrides]


def sweep(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        sweep_command(folder, *overrides),
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=environment(),
        timeout=300,
    )


def notes(folder: Path, name: str) -> dict[int, dict[str, Any]]:
    """Job number -> what it left under ``name``."""
    return {
        int(path.name.rsplit("_", 1)[1]): json.loads(path.read_text())
        for path in folder.glob(f"{name}_[0-9]*")
        if path.is_file() and path.name.rsplit("_", 1)[0] == name
    }


def wait_for(seen: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 400
    while not seen():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_jobs_run_side_by_side_on_cards_of_their_own(tmp_path: Path) -> None:
    """Jobs 0 and 1 wait for each other; then one of two cards and others of one on three cards."""
    done = sweep(
        tmp_path,
        "hydra.launcher.cards=[3,GPU-ab,5]",
        "trainer.devices=1,2",
        "seed=1,2",
        "name=meet_meet_plain_plain",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ended = notes(tmp_path, "ended")
    assert set(ended) == {0, 1, 2, 3}
    held = {number: set(note["cards"].split(",")) for number, note in ended.items()}
    for number, note in ended.items():
        assert len(held[number]) == note["devices"]
        assert held[number] <= {"3", "GPU-ab", "5"}
        assert note["threads"] == str(max(1, (os.cpu_count() or 1) // 3))
    for one, other in itertools.combinations(ended, 2):
        apart = (
            ended[one]["ended"] < ended[other]["began"]
            or ended[other]["ended"] < ended[one]["began"]
        )
        assert apart or not held[one] & held[other]
    assert "#0 trainer.devices=1 seed=1 started on card " in done.stdout
    assert "(4 of 4 done)" in done.stdout
    assert done.stdout.count("swept ") == 1
    assert "speaks" not in done.stdout
    (log,) = tmp_path.glob("sweep_*/jobs/2.log")
    assert log.read_text() == "job 2 speaks\n"


def test_a_job_that_fails_ends_no_other_and_gives_the_exit_code(tmp_path: Path) -> None:
    done = sweep(
        tmp_path,
        "hydra.launcher.slots=2",
        "trainer.accelerator=cpu",
        "name=plain_fails_crashes_killed_refused_plain",
        "seed=0,1,2,3,4,5",
    )
    assert done.returncode == 7, done.stdout + done.stderr
    assert set(notes(tmp_path, "ended")) == {0, 5}
    assert {note["cards"] for note in notes(tmp_path, "ended").values()} == {""}
    (folder,) = tmp_path.glob("sweep_*")
    failures = {f["number"]: (f["code"], f["message"]) for f in read_failed_jobs(folder)}
    assert failures == {
        1: (7, "exit code 7"),
        2: (1, "the disk went away"),
        3: (137, "its process ended by signal 9 and left no message"),
        4: (2, "this will not do"),
    }
    assert f"#2 seed=2 failed: the disk went away (exit code 1; {folder}/jobs/2.log)" in done.stdout
    assert "Traceback" in (folder / "jobs" / "2.log").read_text()
    assert "error: this will not do" in (folder / "jobs" / "4.log").read_text()
    assert "(6 of 6 done)" in done.stdout
    assert f"swept {folder}" in done.stdout


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        pytest.param(
            ["hydra.launcher.slots=2", "trainer.devices=1,3"], "job #1 needs trainer.dev", id="many"
        ),
        pytest.param(
            ["hydra.launcher.slots=2", "trainer.devices=[0,1],1"], "hydra.launcher.cards", id="list"
        ),
        pytest.param(["seed=1,2"], "found no card here", id="no cards"),
        pytest.param(["hydra.launcher.slots=2", "lr=1,fast", "lrr=2"], "'lrr'", id="composition"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(
    overrides: list[str], said: str, tmp_path: Path
) -> None:
    done = sweep(tmp_path, "name=plain", *overrides)
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not notes(tmp_path, "started")


def test_a_job_that_is_stopped_alone_ends_no_other(tmp_path: Path) -> None:
    command = sweep_command(tmp_path, "hydra.launcher.slots=1", "name=waits_plain", "seed=0,1")
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        wait_for(lambda: (tmp_path / "started_0").exists())
        os.kill(notes(tmp_path, "started")[0]["pid"], signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == os.EX_TEMPFAIL
    assert set(notes(tmp_path, "ended")) == {1}
    assert "#0 seed=0 failed: a signal to this job stopped it, all is saved" in output


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1], ids=lambda s: s.name)
def test_a_signal_is_passed_on_and_starts_nothing_more(
    signum: signal.Signals, tmp_path: Path
) -> None:
    command = sweep_command(
        *(tmp_path, "hydra.launcher.slots=2", "name=plain_waits_waits_waits", "seed=0,1,2,3"),
        "resume=auto",
    )
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    scontrol.chmod(0o755)
    path = f"{scontrol.parent}{os.pathsep}{os.environ['PATH']}"
    in_slurm = environment() | {"SLURM_JOB_ID": "12", "PATH": path}
    with subprocess.Popen(
        command, cwd=tmp_path, env=in_slurm, stdout=subprocess.PIPE, text=True
    ) as process:
        wait_for(lambda: set(notes(tmp_path, "started")) == {0, 1, 2})
        process.send_signal(signum)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == os.EX_TEMPFAIL == 75
    assert set(notes(tmp_path, "saved")) == {1, 2}
    assert {note["slurm"] for note in notes(tmp_path, "saved").values()} == {None}
    assert (tmp_path / "asked").read_text() == "requeue 12\n", "once, when all have saved"
    assert set(notes(tmp_path, "started")) == {0, 1, 2}
    assert f"pool: stopped by {signum.name} with 3 job(s) not at their end, 1 of them" in output
    assert "swept" not in output
    assert not list(tmp_path.glob("sweep_*/failed_jobs.jsonl"))


def test_jobs_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    command = sweep_command(tmp_path, "hydra.launcher.slots=1", "name=waits", "seed=0")
    with subprocess.Popen(command, cwd=tmp_path, env=environment()) as process:
        wait_for(lambda: bool(notes(tmp_path, "started")))
        process.kill()
    (note,) = notes(tmp_path, "started").values()
    wait_for(lambda: gone(note["pid"]))
    assert set(notes(tmp_path, "saved")) == {0}


def test_two_jobs_of_two_ranks_are_two_runs(tmp_path: Path) -> None:
    """Real training, side by side on four slots; each job one folder, nothing else."""
    world = make_world(tmp_path, some_documents(8))
    done = world.run(
        *("-m", "hydra/launcher=gpu_pool", "hydra.launcher.slots=4", "trainer.devices=2"),
        *("seed=1,2", "max_seq_len=64", "ttt_steps=2", "epochs=1", "preflight=off"),
    )
    (folder,) = (tmp_path / "runs").iterdir()
    runs = [path for path in folder.iterdir() if (path / "config.yaml").exists()]
    assert len(runs) == 2
    assert {read_json(run, "summary.json")["exit_reason"] for run in runs} == {"finished"}
    bests = sorted(read_json(run, "summary.json")["best/acceptance_replay"] for run in runs)
    values = sorted(json.loads(path.read_text()) for path in folder.glob("jobs/*.value"))
    assert values == bests
    assert (folder / "sweep_summary.md").is_file()
    assert "(2 of 2 done)" in done.stdout


@given(st.data())
def test_no_device_is_held_twice_and_none_is_lost(data: st.DataObject) -> None:
    names = tuple(f"card {n}" for n in range(data.draw(st.integers(1, 8))))
    free = FreeDevices(Devices(names, are_cards=True))
    held: list[Devices] = []
    for count in data.draw(st.lists(st.integers(1, 9), max_size=20)):
        taken = free.take(count)
        in_use = sum(len(devices.names) for devices in held)
        assert (taken is None) == (count > len(names) - in_use)
        if taken is not None:
            held.append(taken)
        elif held:
            free.give(held.pop(data.draw(st.integers(0, len(held) - 1))))
        used = [name for devices in held for name in devices.names]
        assert len(used) == len(set(used))
    for devices in held:
        free.give(devices)
    assert free.take(len(names)) == Devices(names, are_cards=True)


def test_the_pool_holds_the_cards_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 6,GPU-1")
    assert find_devices(None, None).names == ("4", "6", "GPU-1")
    assert find_devices([0, 1], None).names == ("0", "1")
    for cards, slots, said in (
        ([0], 1, "both set"),
        ([2, 2], None, "twice"),
        ([], None, "no card"),
        (None, 0, "slots=0"),
    ):
        with pytest.raises(ConfigError, match=said):
            find_devices(cards, slots)


def test_time_that_is_left() -> None:
    assert remaining_s([10.0, 20.0], [], 0) == 0
    assert remaining_s([10.0, 20.0], [5.0], 0) == 10
    assert remaining_s([10.0], [5.0, 0.0], 3) == pytest.approx(22.5)
    assert remaining_s([10.0], [50.0], 1) == 10


def test_a_job_survives_its_file(tmp_path: Path) -> None:
    config = {"lr": 1.0634e-05, "trainer": {"devices": 2}, "paths": {"shards": None}, "mix": [1]}
    job = PoolJob(3, tmp_path, None, ("lr=1.0634e-05", "a='b c'"), config)
    assert PoolJob.read(job.write()) == job
    assert job.value is None
    job.keep_value(1.25)
    assert PoolJob.read(job.file).value == 1.25
    job.write()
    assert job.value is None, "of an earlier sweep in this folder"
