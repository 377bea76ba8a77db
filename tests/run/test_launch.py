"""Ranks as real processes: codes, signals, and that none is left behind.

The ranks here are a stand-in for ``eagle3.worker``: a module of that name in the working directory,
which ``python -m`` finds first. What it does is said by the file ``role`` of the run folder.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle3.launch import killed_message
from tests.tiny_run import clean_environment

pytestmark = pytest.mark.ddp

REPOSITORY = Path(__file__).parents[2]
WORKER = """
import os, pathlib, signal, sys, time
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
role = (folder / "role").read_text()
def note(name):
    (folder / f"{name}_{rank}").write_text(str(os.getpid()))
def on_term(signum, frame):
    note("terminated")
    sys.exit(75 if role == "saves" else 0)
if role != "stubborn":
    signal.signal(signal.SIGTERM, on_term)
    signal.signal(signal.SIGUSR1, on_term)
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
assert not [a for a in sys.argv if "multirun" in a or "=" in a], sys.argv
note("started")
while not (folder / "started_0").exists() or not (folder / "started_1").exists():
    time.sleep(0.01)
if role == "fine":
    sys.exit(0)
if role == "one fails" and rank == "1" or role == "stubborn" and rank == "0":
    sys.exit(7)
if role == "all have saved":
    time.sleep(0 if rank == "1" else 1)
    sys.exit(75)
if role == "one is killed" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if role == "watched":
    sys.path.insert(0, os.environ["REPOSITORY"])
    del sys.modules["eagle3"]
    from eagle3.launch import end_with_launcher
    end_with_launcher(grace_s=1.0)
    note("watching")
time.sleep(120)
"""
LAUNCHER = """
import pathlib, sys
from eagle3.launch import launch_ranks
print("launching", flush=True)
sys.exit(launch_ranks(pathlib.Path(sys.argv[1]), 2, grace_s=float(sys.argv[2])))
"""


class Launch:
    """A launcher process in a folder with stand-in ranks."""

    def __init__(self, folder: Path, role: str, *, prefix: tuple[str, ...] = ()) -> None:
        self.folder = folder
        (folder / "role").write_text(role)
        package = folder / "eagle3"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "worker.py").write_text(WORKER)
        self.script = folder / "bin" / "launcher.py"
        self.script.parent.mkdir()
        self.script.write_text(LAUNCHER)
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(self.script), str(folder), "2"],
            cwd=folder,
            env=clean_environment()
            | {"PYTHONPATH": str(REPOSITORY), "REPOSITORY": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_for(self, *names: str) -> None:
        for name in names:
            while not (self.folder / name).exists():
                assert self.process.poll() is None, self.process.communicate()[0]
                time.sleep(0.01)

    def end(self) -> int:
        output, _ = self.process.communicate(timeout=60)
        print(output)
        return self.process.returncode

    def ranks_left(self) -> list[int]:
        pids = [int(path.read_text()) for path in self.folder.glob("started_*")]
        return [pid for pid in pids if is_running(pid)]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for path in tmp_path.glob("started_*"):
        if is_running(int(path.read_text())):
            os.kill(int(path.read_text()), signal.SIGKILL)


def test_ranks_that_end_well_give_code_0(folder: Path) -> None:
    launch = Launch(folder, "fine")
    assert launch.end() == 0
    assert launch.ranks_left() == []


def test_a_failing_rank_ends_the_others_with_its_code(folder: Path) -> None:
    launch = Launch(folder, "one fails")
    assert launch.end() == 7
    assert (folder / "terminated_0").exists()
    assert launch.ranks_left() == []


def test_a_killed_rank_is_named_with_its_signal_and_how_to_go_on(folder: Path) -> None:
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "step00000008.ckpt").touch()
    launch = Launch(folder, "one is killed")
    output, _ = launch.process.communicate(timeout=60)
    assert launch.process.returncode == 128 + signal.SIGKILL
    assert (folder / "terminated_0").exists()
    (message,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert message.startswith("error: rank 1 was ended by signal 9 (SIGKILL)")
    assert message.endswith(f"go on with resume={folder / 'checkpoints' / 'step00000008.ckpt'}")
    assert launch.ranks_left() == []


def test_a_signal_without_a_name_is_told_by_its_number(tmp_path: Path) -> None:
    message = killed_message(tmp_path, 0, signal.SIGRTMIN + 3)
    assert f"rank 0 was ended by signal {signal.SIGRTMIN + 3}" in message
    assert message.endswith("start the run again")


def test_a_rank_that_does_not_end_is_killed_after_the_grace(folder: Path) -> None:
    launch = Launch(folder, "stubborn")
    assert launch.end() == 7
    assert launch.ranks_left() == []


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)
def test_a_signal_is_passed_on(folder: Path, signum: signal.Signals) -> None:
    launch = Launch(folder, "waits")
    launch.wait_for("started_0", "started_1")
    launch.process.send_signal(signum)
    code = launch.end()
    assert code == -signum
    if signum is signal.SIGTERM:
        assert (folder / "terminated_0").exists()
        assert (folder / "terminated_1").exists()
    assert launch.ranks_left() == []


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1], ids=lambda s: s.name)
def test_ranks_that_save_after_a_signal_give_their_code(
    folder: Path, signum: signal.Signals
) -> None:
    launch = Launch(folder, "saves")
    launch.wait_for("started_0", "started_1")
    launch.process.send_signal(signum)
    assert launch.end() == os.EX_TEMPFAIL == 75
    assert launch.ranks_left() == []


def test_a_rank_that_has_saved_does_not_cut_the_others_short(folder: Path) -> None:
    """A signal to one rank alone: all save, and the first rank still reports."""
    launch = Launch(folder, "all have saved")
    assert launch.end() == 75
    assert not (folder / "terminated_0").exists()


def test_ranks_end_when_their_launcher_is_killed(folder: Path) -> None:
    launch = Launch(folder, "watched")
    launch.wait_for("watching_0", "watching_1")
    launch.process.kill()
    launch.process.communicate()
    deadline = time.monotonic() + 30
    while launch.ranks_left() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert launch.ranks_left() == []


def test_nohup_survives_the_end_of_the_terminal(folder: Path) -> None:
    launch = Launch(folder, "waits", prefix=("nohup",))
    launch.wait_for("started_0", "started_1")
    pids = [int((folder / f"started_{rank}").read_text()) for rank in range(2)]
    for pid in [launch.process.pid, *pids]:
        os.kill(pid, signal.SIGHUP)
    time.sleep(0.3)
    assert launch.process.poll() is None
    assert len(launch.ranks_left()) == 2
    launch.process.send_signal(signal.SIGTERM)
    assert launch.end() == -signal.SIGTERM
