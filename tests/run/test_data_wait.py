"""Waiting for data: the share in the log, one warning, and how the ranks compare."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch

from eagle3.callbacks import Throughput
from eagle3.callbacks.data_wait import STEPS, DataWaitAlarm, RecentWaiting, Waiting
from eagle3.callbacks.rank_times import OwnTime, gather, rank_skew
from eagle3.data.batch import Window
from eagle3.loggers import CsvLogger
from eagle3.run_folder import read_metrics
from tests.run.toy import ToyModule

pytestmark = pytest.mark.filterwarnings(
    "ignore:`isinstance.treespec, LeafSpec.`", "ignore:.*but have no `val_dataloader`"
)

READ_BYTES = 57_344 * 100
"""Of a window of the toy module, which has 100 rows."""


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class ThrottledReader:
    """Windows that take ``wait_s`` each to read, as a slow disk makes them."""

    def __init__(self, clock: Clock, waits: list[float]) -> None:
        self.clock = clock
        self.waits = waits

    def __len__(self) -> int:
        return len(self.waits)

    def __iter__(self) -> Iterator[Window]:
        for step, wait_s in enumerate(self.waits):
            self.clock.now += wait_s
            yield Window((), step, wait_s=wait_s, read_bytes=READ_BYTES)


class Computing(ToyModule):
    """A step takes 10 ms."""

    def __init__(self, clock: Clock) -> None:
        super().__init__([1.0])
        self.clock = clock

    def training_step(self, batch: Window, batch_idx: int) -> dict[str, Any]:
        self.clock.now += 0.010
        return super().training_step(batch, batch_idx)


def train(folder: Path, waits: list[float]) -> None:
    """One epoch, without validation."""
    clock = Clock()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=CsvLogger(folder / "metrics.csv"),
        callbacks=[Throughput(len(waits), len(waits), clock=clock)],
        default_root_dir=folder,
        log_every_n_steps=1,
        limit_val_batches=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Computing(clock), ThrottledReader(clock, waits))


def test_a_throttled_reader_shows_and_warns_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, [0.030] * 60)
    last = read_metrics(tmp_path)[-1]
    assert last["perf/data_wait_frac"] == pytest.approx(0.75)
    assert "perf/rank_skew" not in last, "a single rank has nobody to be compared with"
    (warning,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("warning")]
    assert "75% of the time" in warning
    assert "reads 0.143 GB/s, 57,344 bytes per token, and could use 0.573 GB/s" in warning
    for remedy in ("data.num_workers", "data.read_mode", "max_seq_len", "faster or local disk"):
        assert remedy in warning


@pytest.mark.parametrize(
    ("waits", "warnings"),
    [
        ([0.002] * 40, 0),
        ([1.000] + [0.001] * 40, 0),
        ([0.030] * 15, 0),
        ([0.030] * 30 + [0.002] * 5 + [0.030] * 30, 1),
        ([0.030] * 30 + [0.0] * 30 + [0.030] * 30, 2),
    ],
    ids=["fast", "only the first window", "too few steps", "not recovered", "twice"],
)
def test_the_warning_comes_when_it_should(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], waits: list[float], warnings: int
) -> None:
    train(tmp_path, waits)
    assert capsys.readouterr().out.count("warning: training waits") == warnings


def test_nothing_is_said_before_enough_steps() -> None:
    recent = RecentWaiting()
    for _ in range(STEPS - 1):
        recent.add(Waiting(1.0, 0.9, 100, 10))
    assert recent.total() == Waiting()
    recent.add(Waiting(1.0, 0.9, 100, 10))
    assert recent.total().share == pytest.approx(0.9)


def test_the_rank_that_waits_is_named() -> None:
    warning = DataWaitAlarm().judge(3, Waiting(2.0, 1.0, 4e9, 1e5))
    assert warning is not None
    assert "50% of the time" in warning
    assert "Rank 3 reads 2 GB/s, 40,000 bytes per token" in warning


def test_own_time_ends_at_the_last_backward() -> None:
    clock, cpu = Clock(), torch.device("cpu")
    own = OwnTime(clock)
    own.backward_begins(cpu)
    assert own.seconds == 0.0, "a step that is not measured"
    own.start(cpu)
    for _ in range(2):
        clock.now += 0.5
        own.backward_begins(cpu)
    clock.now += 9.0
    own.stop()
    own.backward_begins(cpu)
    assert own.seconds == 1.0


def test_skew_is_largest_over_mean() -> None:
    assert rank_skew(torch.tensor([1.0, 3.0])) == 1.5
    assert rank_skew(torch.tensor([2.0, 2.0])) == rank_skew(torch.zeros(2)) == 1.0
    assert gather([1.0, 2.0], torch.device("cpu")).tolist() == [[1.0, 2.0]]
