"""What a run says about itself: planted faults in real runs, and the decisions one by one."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3.callbacks import Throughput
from eagle3.callbacks.health import Health
from eagle3.callbacks.health_alerts import AlertKind, Alerts
from eagle3.callbacks.health_judges import DiskRoom, FallingAcceptance, GradientNorms
from eagle3.callbacks.health_watch import HealthWatch, Standing
from eagle3.config import Config, HealthConfig
from eagle3.provenance import job_fingerprint
from tests.run.toy import STEPS_PER_EPOCH, ToyModule, train_toy
from tests.run.wandb_file import read_offline_run
from tests.tiny_run import clean_environment, curve, last_weights, make_world, some_documents

ROOT = Path(__file__).parents[2]
toy = pytest.mark.filterwarnings(
    "ignore:`isinstance.treespec, LeafSpec.`",
    "ignore:The '.*dataloader' does not have many workers",
)


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def heartbeat(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "heartbeat.json").read_text())
    return content


def test_planted_faults_are_said_once_each_and_training_ends_well(tmp_path: Path) -> None:
    """A huge gradient, one that is not finite, and a step that hangs; W&B offline."""
    world = make_world(tmp_path, some_documents(24))
    command = world.command(
        "max_seq_len=16",
        "epochs=2",
        "logger.wandb=offline",
        "health.heartbeat_s=0.1",
        "health.stall_minutes=0.02",
    )
    command[1:3] = ["-m", "tests.run.faulty_train", "huge:25,nan:30,hang:34"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=clean_environment() | {"WANDB_SILENT": "true"},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("warning: ")]
    (huge,) = [line for line in said if "the gradient norm of step 25 is" in line]
    assert "times the median of the 24 steps before" in huge
    (left_out,) = [line for line in said if "the gradient is not finite" in line]
    assert "optimizer step 30 left out" in left_out
    (hung,) = [line for line in said if "no step for" in line]
    (folder,) = world.run_folders()
    assert str(folder / "stacks.txt") in hung
    assert "faulty_train.py" in (folder / "stacks.txt").read_text()
    sent = [title for title, _ in read_offline_run(folder).alerts]
    assert sorted(sent) == sorted(
        [AlertKind.gradient_norm, AlertKind.non_finite, AlertKind.no_step]
    )
    norms = curve(folder, "optim/grad_norm")
    assert max(norms) == norms[24] > 1e4
    assert norms[29] == -1.0
    assert all(bool(torch.isfinite(weight).all()) for weight in last_weights(folder).values())
    last = heartbeat(folder)
    assert (last["status"], last["step"]) == ("ended", len(norms) - 1)
    assert last["eta_s"] >= 0
    assert last["loss"] == pytest.approx(curve(folder, "train/loss")[-1])


def health(folder: Path, **options: float) -> Health:
    throughput = Throughput(3 * STEPS_PER_EPOCH, STEPS_PER_EPOCH)
    config = HealthConfig(**options)
    return Health(config, folder, throughput, Alerts(), clip_norm=1.0)


@toy
@pytest.mark.parametrize(
    ("scores", "falls"),
    [
        pytest.param([1.5, 1.4, 1.3, 1.2], True, id="three_falls"),
        pytest.param([1.5, 1.4, 1.3, 1.3], False, id="two_falls"),
        pytest.param([1.4, 1.5, 1.4, 1.3], False, id="a_rise_first"),
    ],
)
def test_falling_acceptance_is_said_at_the_third_fall(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], scores: list[float], falls: bool
) -> None:
    train_toy(tmp_path, ToyModule(scores), callbacks=[health(tmp_path)], epochs=4)
    output = capsys.readouterr().out
    assert output.count("fell 3 validations in a row") == falls
    assert not falls or "(1.500, 1.400, 1.300, 1.200)" in output


@toy
def test_the_heartbeat_says_how_far_a_run_is_and_when_it_ended(tmp_path: Path) -> None:
    watched: list[dict[str, Any]] = []

    class Watching(ToyModule):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            watched.append(heartbeat(tmp_path))

    with pytest.raises(RuntimeError):
        train_toy(tmp_path, Watching([1.0], raise_at=3), callbacks=[health(tmp_path)])
    assert {beat["status"] for beat in watched} == {"running"}
    assert watched[0]["step"] == 0
    assert watched[0]["loss"] is None
    last = heartbeat(tmp_path)
    assert (last["status"], last["step"]) == ("ended", 3)
    assert last["total_steps"] == 3 * STEPS_PER_EPOCH
    assert last["pid"] == os.getpid()


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_another_beat(folder: Path) -> None:
    path = folder / "heartbeat.json"
    written = path.stat().st_mtime_ns
    until(lambda: path.stat().st_mtime_ns > written)


def test_a_standstill_is_said_once_and_another_one_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The thread is real, its clock is not; alerts of one kind keep ten minutes apart."""
    clock, looks = Clock(), [0]

    def look() -> None:
        looks[0] += 1

    def look_twice() -> None:
        seen = looks[0]
        until(lambda: looks[0] >= seen + 2)

    alerts = Alerts(clock=clock)
    watch = HealthWatch(tmp_path, alerts, stall_s=600, every_s=0.01, also=look, clock=clock)
    watch.start(Standing(7, 100, 0.5))
    look_twice()
    assert heartbeat(tmp_path)["status"] == "running"
    clock.now = 601.0
    look_twice()
    look_twice()
    assert heartbeat(tmp_path)["status"] == "stalled"
    assert heartbeat(tmp_path)["seconds_since_step"] == 601.0
    watch.sign(Standing(8, 100, 0.5))
    look_twice()
    assert heartbeat(tmp_path)["status"] == "running"
    clock.now = 2000.0
    look_twice()
    watch.stop()
    watch.stop()
    assert heartbeat(tmp_path)["status"] == "ended"
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(";")[0] for line in lines] == [
        "warning: no step for 10 minutes, the last was 7 of 100",
        "warning: no step for 23.3 minutes, the last was 8 of 100",
    ]


@toy
def test_a_disk_without_room_for_two_checkpoints_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sparse file stands for a checkpoint larger than the disk."""
    (tmp_path / "checkpoints").mkdir()
    with (tmp_path / "checkpoints" / "step00000001.ckpt").open("wb") as file:
        file.truncate(2**42)

    class Slow(ToyModule):
        def on_train_start(self) -> None:
            wait_for_another_beat(tmp_path)
            wait_for_another_beat(tmp_path)  # comes after the first look at the disk

    train_toy(tmp_path, Slow([1.0, 1.0, 1.0]), callbacks=[health(tmp_path, heartbeat_s=0.01)])
    (line,) = capsys.readouterr().out.splitlines()
    assert "a checkpoint takes 4.40 TB" in line
    assert str(tmp_path) in line


def test_room_is_missed_again_only_after_it_was_there() -> None:
    room = DiskRoom()
    told = [room.judge(free, 10, "disk") is not None for free in (25, 19, 15, 20, 19)]
    assert told == [False, True, False, False, True]


@given(st.lists(st.floats(0.5, 2.0), min_size=20, max_size=200))
def test_ordinary_gradients_are_never_remarked(norms: list[float]) -> None:
    judge = GradientNorms(factor=10.0)
    assert [judge.judge(step, norm, 1.0) for step, norm in enumerate(norms)] == [None] * len(norms)


@given(st.integers(20, 60), st.integers(1, 9), st.integers(0, 9), st.integers(10, 30))
def test_a_burst_is_one_line(before: int, first: int, gap: int, after: int) -> None:
    """Outliers with fewer than ten ordinary steps between them are one burst."""
    judge = GradientNorms(factor=10.0)
    norms = [1.0] * before + [50.0] * first + [1.0] * gap + [70.0] + [1.0] * after + [90.0]
    lines = [judge.judge(step, norm, 1.0) for step, norm in enumerate(norms)]
    said = [step for step, line in enumerate(lines) if line is not None]
    assert said == [before, len(norms) - 1]


def test_before_twenty_steps_and_for_what_is_not_finite_nothing_is_said() -> None:
    judge = GradientNorms(factor=10.0)
    norms = [1.0] * 19 + [100.0] + [1.0] + [float("nan"), float("inf")]
    assert not any(judge.judge(step, norm, 1.0) for step, norm in enumerate(norms))


def test_a_fall_is_remembered_over_a_restart() -> None:
    before = FallingAcceptance()
    assert not any(map(before.judge, (1.5, 1.4, 1.3)))
    assert FallingAcceptance(before.values).judge(1.2) is not None
    assert FallingAcceptance().judge(1.2) is None


def test_alerts_of_a_kind_keep_ten_minutes_apart(capsys: pytest.CaptureFixture[str]) -> None:
    class Board:
        def __init__(self) -> None:
            self.sent: list[tuple[str, str]] = []

        def alert(self, title: str, text: str, level: str) -> None:
            self.sent.append((title, text))
            if len(self.sent) == 3:
                raise OSError("no network")

    clock, board = Clock(), Board()
    alerts = Alerts(board, clock)
    for now in (0, 10, 599, 600):
        clock.now = now
        alerts.send(AlertKind.data_wait, "warning: data")
    alerts.send(AlertKind.disk, "warning: disk", printed=True)
    title = AlertKind.data_wait.value
    later = "data (2 more like it since the last such warning)"
    assert board.sent == [(title, "data"), (title, later), (AlertKind.disk.value, "disk")]
    assert capsys.readouterr().out.splitlines() == [
        "warning: data",
        f"warning: {later}",
        "W&B took no alert (OSError: no network)",
    ]


def test_titles_are_short_enough_for_the_dashboard() -> None:
    assert all(len(kind.value) < 64 for kind in AlertKind)


def test_what_is_watched_does_not_make_another_job() -> None:
    watched = Config(health=HealthConfig(stall_minutes=1.0))
    assert job_fingerprint(watched) == job_fingerprint(Config())
