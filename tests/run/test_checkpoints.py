"""What is saved and when, disks that refuse, early stop: a toy module under a real Trainer."""

from __future__ import annotations

import errno
import itertools
import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import Callback

from eagle3.callbacks import (
    AtomicCheckpointIO,
    CheckpointPolicy,
    EarlyStop,
    Throughput,
    ValidationSchedule,
)
from eagle3.callbacks.stop_signals import STOPPING, StopSignals
from eagle3.errors import ConfigError, TrainingError
from eagle3.loggers import CsvLogger
from eagle3.planning.saving import pause_s
from eagle3.run_folder import read_metrics
from tests.run.toy import STEPS_PER_EPOCH, ToyModule, train_toy

pytestmark = pytest.mark.filterwarnings(
    "ignore:`isinstance.treespec, LeafSpec.`",
    "ignore:The '.*dataloader' does not have many workers",
    "ignore:You're resuming from a checkpoint that ended",
)

SCORES = [1.2, 1.4, 1.3]


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in STOPPING}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


class At(Callback):
    """Does something in the middle of one optimizer step."""

    def __init__(self, step: int, act: Callable[[], None]) -> None:
        self.step, self.act = step, act

    def on_train_batch_start(self, trainer: lightning.Trainer, *args: Any) -> None:
        if trainer.global_step + 1 == self.step:
            self.act()


class StepClock(Callback):
    """Shows seconds that pass at the start of each step, and while a checkpoint is made."""

    def __init__(self, step_s: float, save_s: float = 0) -> None:
        self.step_s, self.save_s, self.now = step_s, save_s, 0.0

    def __call__(self) -> float:
        return self.now

    def on_train_batch_start(self, *_: Any) -> None:
        self.now += self.step_s

    def on_save_checkpoint(self, *_: Any) -> None:
        self.now += self.save_s


def run_toy(
    folder: Path,
    *others: Callback,
    scores: list[float] | None = None,
    val_every: int | None = None,
    max_steps: int = -1,
    resume: Path | None = None,
    **policy: Any,
) -> CheckpointPolicy:
    """Three epochs of four steps; validated at epoch ends, every ``val_every`` and at the end."""
    folder.mkdir(exist_ok=True)
    total = max_steps if max_steps > 0 else 3 * STEPS_PER_EPOCH
    logger = CsvLogger(folder / "metrics.csv")
    saves = CheckpointPolicy(folder / "checkpoints", logged_rows=lambda: logger.rows, **policy)
    callbacks = [saves, ValidationSchedule(val_every, total), Throughput(total, STEPS_PER_EPOCH)]
    train_toy(
        folder,
        ToyModule(scores or SCORES),
        callbacks=[*callbacks, *others],
        loggers=[logger],
        max_steps=max_steps,
        resume=resume,
    )
    return saves


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def load(folder: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(folder / "checkpoints" / name, weights_only=True)
    return content


def test_the_best_checkpoint_holds_the_value_just_validated(tmp_path: Path) -> None:
    policy = run_toy(tmp_path)
    assert files(tmp_path) == ["best.ckpt", "step00000008.ckpt", "step00000012.ckpt"]
    best = load(tmp_path, "best.ckpt")
    assert best["global_step"] == 8
    assert best["callbacks"]["CheckpointPolicy"]["best_value"] == pytest.approx(1.4)
    assert best["callbacks"]["CheckpointPolicy"]["best_step"] == 8
    assert (policy.best_value, policy.best_step) == (pytest.approx(1.4), 8)
    assert policy.best_path == tmp_path / "checkpoints" / "best.ckpt"
    assert policy.newest() == tmp_path / "checkpoints" / "step00000012.ckpt"


@pytest.mark.parametrize(
    ("every_steps", "keep_last", "kept"),
    [(None, 1, [12]), (None, 9, [4, 8, 12]), (5, 9, [4, 5, 8, 10, 12]), (1, 3, [10, 11, 12])],
)
def test_steps_epoch_ends_and_how_many_are_kept(
    every_steps: int | None, keep_last: int, kept: list[int], tmp_path: Path
) -> None:
    run_toy(tmp_path, every_steps=every_steps, keep_last=keep_last)
    assert files(tmp_path) == ["best.ckpt", *(f"step{step:08d}.ckpt" for step in kept)]
    assert all(load(tmp_path, f"step{step:08d}.ckpt")["global_step"] == step for step in kept)


def test_time_also_makes_a_checkpoint_due(tmp_path: Path) -> None:
    """A clock that moves by 20 s a step, and by nothing while something is saved."""
    clock = StepClock(20)
    run_toy(tmp_path, clock, every_minutes=1, keep_last=9, clock=clock)
    steps = [int(name[4:12]) for name in files(tmp_path) if name.startswith("step")]
    assert steps == [3, 4, 7, 8, 11, 12]


def test_a_slow_disk_is_asked_less_often(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A save takes 4 s, so one by time comes 49 x 4 s after the last, ends of epochs as before."""
    clock = StepClock(20, save_s=4)
    run_toy(tmp_path, clock, every_minutes=1, keep_last=9, clock=clock, scores=[1.0, 0.9, 0.8])
    steps = [int(name[4:12]) for name in files(tmp_path) if name.startswith("step")]
    assert steps == [3, 4, 8, 12], "the first knows of no save yet; 80 s later each epoch ends"
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert said == [
        "note: a save took 4.0 s, so the next by time comes after 3.3 min instead of "
        "trainer.checkpoint_every_minutes=1: saves by time take at most 2% of a run"
    ]


@given(wanted=st.floats(1, 1e5), save=st.floats(0, 1e4))
def test_saves_by_time_take_two_percent_at_most(wanted: float, save: float) -> None:
    pause = pause_s(wanted, save)
    assert save / (save + pause) <= 0.02 + 1e-9
    assert pause == wanted or pause == pytest.approx(49 * save)


def test_a_run_cut_by_max_steps_goes_on_within_its_epoch(tmp_path: Path) -> None:
    run_toy(tmp_path, max_steps=6)
    assert files(tmp_path) == ["best.ckpt", "step00000004.ckpt", "step00000006.ckpt"]
    progress = load(tmp_path, "step00000006.ckpt")["loops"]["fit_loop"]
    assert progress["epoch_loop.batch_progress"]["current"]["ready"] == 2
    assert progress["epoch_progress"]["current"]["processed"] == 1


@pytest.mark.parametrize("step", [1, 3, 4, 5, 6, 8, 9, 11, 12])
def test_rows_and_validations_after_any_checkpoint_are_those_of_the_whole_run(
    step: int, tmp_path: Path
) -> None:
    """Validations at 3, 4, 6, 8, 9 and 12: none repeated, none left out, the same best."""
    scores = [1.1, 1.5, 1.2, 1.3, 1.6, 1.4]
    every = {"val_every": 3, "every_steps": 1, "keep_last": 12}
    whole = run_toy(tmp_path / "whole", scores=scores, **every)
    begun = tmp_path / "whole" / "checkpoints" / f"step{step:08d}.ckpt"
    rows = torch.load(begun, weights_only=True)["callbacks"]["CheckpointPolicy"]["rows"]
    expected = read_metrics(tmp_path / "whole")
    validated = sum("val/accuracy" in row for row in expected[:rows])
    rest = run_toy(tmp_path / "rest", scores=scores[validated:] or [0.0], resume=begun, **every)
    found = read_metrics(tmp_path / "rest")
    assert plain(found) == plain(expected[rows:])
    assert (rest.best_value, rest.best_step) == (whole.best_value, whole.best_step)
    if step < 12:
        last = load(tmp_path / "rest", "step00000012.ckpt")
        assert torch.equal(
            last["state_dict"]["layer.weight"],
            load(tmp_path / "whole", "step00000012.ckpt")["state_dict"]["layer.weight"],
        )
        assert last["loops"] == load(tmp_path / "whole", "step00000012.ckpt")["loops"]


def plain(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Without what a clock has measured."""
    return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in rows]


def test_a_run_that_goes_on_deletes_what_lies_ahead(tmp_path: Path) -> None:
    run_toy(tmp_path, every_steps=1, keep_last=9)
    (tmp_path / "checkpoints" / ".step00000013.ckpt.tmp").touch()
    begun = tmp_path / "checkpoints" / "step00000006.ckpt"
    run_toy(tmp_path, scores=[1.4, 1.3], every_steps=1, keep_last=2, max_steps=7, resume=begun)
    assert files(tmp_path) == ["best.ckpt", "step00000006.ckpt", "step00000007.ckpt"]


@pytest.mark.parametrize("there", [True, False])
def test_the_best_of_another_folder_counts_while_its_file_is_there(
    there: bool, tmp_path: Path
) -> None:
    run_toy(tmp_path / "first", keep_last=9)
    if not there:
        (tmp_path / "first" / "checkpoints" / "best.ckpt").unlink()
    begun = tmp_path / "first" / "checkpoints" / "step00000008.ckpt"
    policy = run_toy(tmp_path / "second", scores=[1.3], resume=begun)
    assert policy.best_value == pytest.approx(1.4 if there else 1.3)
    folder = tmp_path / ("first" if there else "second")
    assert policy.best_path == folder / "checkpoints" / "best.ckpt"


@pytest.mark.parametrize("failing", [[2], [5], [5, 6], [1, 8, 9]])
def test_a_full_disk_costs_one_warning_and_is_tried_again(
    failing: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    saves, real = itertools.count(1), os.fsync

    def fsync(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        if name.endswith(".tmp") and next(saves) in failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    run_toy(tmp_path, scores=[1.0, 0.9, 0.8], every_steps=1, keep_last=20)
    written = capsys.readouterr().out
    assert written.count("warning: ") == written.count("No space left") == len(failing)
    names = [f"step{step:08d}.ckpt" for step in range(1, 5)] + ["best.ckpt"]
    order = [*names[:3], names[4], names[3], *(f"step{step:08d}.ckpt" for step in range(5, 13))]
    missing = {order[number - 1] for number in failing}
    assert files(tmp_path) == sorted(set(order) - missing)
    assert all(load(tmp_path, name)["global_step"] for name in files(tmp_path))


def test_a_best_that_could_not_be_saved_is_not_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = AtomicCheckpointIO.save_checkpoint

    def save(self: AtomicCheckpointIO, checkpoint: dict[str, Any], path: Path) -> None:
        real(self, checkpoint, path)
        if checkpoint["global_step"] == 8 and path.name == "best.ckpt":
            self.failure = OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(
        AtomicCheckpointIO, "save_checkpoint", lambda s, c, p, storage_options: save(s, c, p)
    )
    policy = run_toy(tmp_path)
    assert (policy.best_value, policy.best_step) == (pytest.approx(1.3), 12)


def test_three_failures_in_a_row_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(TrainingError, match=r"Input/output error.*3 saves failed in a row"):
        run_toy(tmp_path, every_steps=1)
    assert files(tmp_path) == []


def test_a_full_device_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    writer, path = AtomicCheckpointIO(), tmp_path / "best.ckpt"
    writer.save_checkpoint({"step": torch.tensor(1)}, path)
    assert writer.failure is None
    (tmp_path / ".best.ckpt.tmp").symlink_to("/dev/full")
    writer.save_checkpoint({"step": torch.zeros(100_000)}, path)
    assert writer.failure is not None
    assert writer.failure.errno == errno.ENOSPC
    assert [found.name for found in tmp_path.iterdir()] == ["best.ckpt"]
    assert torch.load(path, weights_only=True)["step"] == 1


def test_an_error_that_is_not_the_disks_is_raised(tmp_path: Path) -> None:
    class Unpicklable:
        def __reduce__(self) -> str:
            raise RuntimeError("not a value")

    with pytest.raises(RuntimeError, match="not a value"):
        AtomicCheckpointIO().save_checkpoint({"bad": Unpicklable()}, tmp_path / "best.ckpt")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", [3, 4, 12])
@pytest.mark.parametrize("signum", STOPPING, ids=lambda s: s.name)
def test_a_signal_saves_after_its_step(step: int, signum: signal.Signals, tmp_path: Path) -> None:
    """Also at an epoch's last step, and at the run's last, after their validation."""
    with pytest.raises(SystemExit) as stopped:
        run_toy(tmp_path, At(step, lambda: os.kill(os.getpid(), signum)))
    assert stopped.value.code == os.EX_TEMPFAIL == 75
    assert f"step{step:08d}.ckpt" in files(tmp_path)
    assert len(read_metrics(tmp_path)) == step + step // 4, "training rows and validations"


def test_a_second_interrupt_ends_at_once_but_not_an_echo() -> None:
    times = iter([0.0, 0.1, 5.0])
    signals = StopSignals(clock=lambda: next(times))
    signals.install()
    try:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert signals.received is signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signals.restore()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_signals_that_were_ignored_stay_so() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals = StopSignals()
    signals.install()
    signal.raise_signal(signal.SIGINT)
    signals.restore()
    assert signals.received is None
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def validated_until(folder: Path) -> int:
    return int(max(row["trainer/global_step"] for row in read_metrics(folder)))


@pytest.mark.parametrize(
    ("metric", "patience", "scores", "last"),
    [
        ("val/acceptance_replay", 2, [1.3, 1.2, 1.3, 1.1, 1.0, 1.0], 6),
        ("val/acceptance_replay", 3, [1.3, 1.2, 1.4, 1.1, 1.0, 1.0], 12),
        ("val/accuracy", 1, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 4),
        ("val/acceptance_replay", 9, [1.0] * 6, 12),
    ],
)
def test_early_stop(
    metric: str, patience: int, scores: list[float], last: int, tmp_path: Path
) -> None:
    """Validations at 3, 4, 6, 8, 9, 12; the toy's accuracy never changes."""
    run_toy(tmp_path, EarlyStop(metric, patience), scores=scores, val_every=3)
    assert validated_until(tmp_path) == last
    assert f"step{last:08d}.ckpt" in files(tmp_path)


def test_early_stop_goes_on_counting_after_a_checkpoint(tmp_path: Path) -> None:
    stop = {"val_every": 3, "every_steps": 1, "keep_last": 12}
    run_toy(tmp_path / "a", EarlyStop("val/accuracy", 2), scores=[1.0] * 6, max_steps=4, **stop)
    begun = tmp_path / "a" / "checkpoints" / "step00000004.ckpt"
    run_toy(tmp_path / "b", EarlyStop("val/accuracy", 2), scores=[1.0] * 6, resume=begun, **stop)
    assert validated_until(tmp_path / "b") == 6
    kept = load(tmp_path / "b", "step00000006.ckpt")["callbacks"]["EarlyStop"]
    assert kept == {"best": 0.5, "waited": 2}


def test_less_loss_is_better(tmp_path: Path) -> None:
    class Loss(Callback):
        def on_validation_epoch_end(self, trainer: lightning.Trainer, module: Any) -> None:
            module.log("val/loss", math.exp(-trainer.global_step))

    run_toy(tmp_path / "falls", Loss(), EarlyStop("val/loss", 1))
    assert validated_until(tmp_path / "falls") == 12
    with pytest.raises(ConfigError, match=r"val/loss: this validation measured val/acceptance_rep"):
        run_toy(tmp_path / "unknown", EarlyStop("val/loss", 1))
