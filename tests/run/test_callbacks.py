"""Progress lines, throughput figures and validation, on a toy module under a real Trainer."""

from __future__ import annotations

import io
import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from eagle3.callbacks import Progress, Throughput, ValidationSchedule
from eagle3.callbacks.progress import duration, share, thousands, training_line
from eagle3.callbacks.throughput import Meter, StepTiming
from eagle3.loggers import CsvLogger
from eagle3.run_folder import X_AXIS, read_metrics, series
from tests.run.toy import STEPS_PER_EPOCH, ToyModule, train_toy

pytestmark = pytest.mark.filterwarnings(
    "ignore:`isinstance.treespec, LeafSpec.`",
    "ignore:The '.*dataloader' does not have many workers",
)

SCORES = [1.2, 1.4, 1.3]


class Clock:
    """Half a second between any two looks at it."""

    def __init__(self, tick: float = 0.5) -> None:
        self.times = itertools.count()
        self.tick = tick

    def __call__(self) -> float:
        return next(self.times) * self.tick


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def timing(seconds: float, **values: float) -> StepTiming:
    fields: dict[str, Any] = {"wait_s": 0.0, "read_bytes": 0, "rows": 0, "supervised": 0, **values}
    return StepTiming(seconds=seconds, **fields)


def test_rates_are_sums_over_sums() -> None:
    meter = Meter()
    meter.add(timing(1.0, rows=100, supervised=50, wait_s=0.5, read_bytes=4_000_000_000))
    meter.add(timing(3.0, rows=100, supervised=30, wait_s=0.5))
    assert meter.tokens_per_s == 50
    assert meter.supervised_tokens_per_s == 20
    assert meter.data_wait_frac == 0.25
    assert meter.read_gb_per_s == 1.0
    assert meter.step_s == 2.0


def test_only_recent_steps_count() -> None:
    meter = Meter(window=2)
    for seconds in (100.0, 1.0, 3.0):
        meter.add(timing(seconds))
    assert meter.step_s == 2.0


def test_p95_is_a_step_that_was_seen() -> None:
    meter = Meter()
    assert meter.step_s_p95 == 0.0
    for seconds in range(1, 101):
        meter.add(timing(float(seconds)))
    assert meter.step_s_p95 == 96.0


def test_a_slow_reader_shows_as_waiting() -> None:
    meter = Meter()
    meter.add(timing(1.0, wait_s=0.8))
    assert meter.data_wait_frac == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (42, "42s"), (190, "3m10s"), (18180, "5h03m"), (187200, "2d04h")],
)
def test_durations_have_two_units(seconds: int, text: str) -> None:
    assert duration(seconds) == text


def test_numbers_are_short() -> None:
    assert [thousands(v) for v in (0, 950, 1234, 45_320, 1_200_000)] == [
        "0",
        "950",
        "1.23k",
        "45.3k",
        "1.2M",
    ]
    assert [share(v) for v in (0.32, 0.0, 1.0)] == [".320", ".000", "1.000"]


def test_the_line_says_step_epoch_loss_speed_and_time_left() -> None:
    throughput = Throughput(total_steps=1000, steps_per_epoch=200)
    throughput.steps_done = 120
    throughput.meter.add(timing(0.2, rows=240, wait_s=0.004))
    assert training_line(throughput, epochs=5, loss=2.314, accuracy=0.32) == (
        "step 120/1000 epoch 1/5 loss 2.31 acc .320 | 1.2k tok/s | data wait 2% | ETA 2m56s"
    )


def run_toy(folder: Path, stream: io.StringIO, tick: float = 0.5, **kwargs: Any) -> None:
    throughput = Throughput(3 * STEPS_PER_EPOCH, STEPS_PER_EPOCH, clock=Clock())
    progress = Progress(throughput, 3, stream=stream, clock=Clock(tick))
    callbacks = [throughput, progress]
    logger = CsvLogger(folder / "metrics.csv")
    train_toy(folder, ToyModule(SCORES), callbacks=callbacks, loggers=[logger], **kwargs)


def test_a_log_file_gets_whole_lines_at_the_first_steps_then_rarely(tmp_path: Path) -> None:
    stream = io.StringIO()
    run_toy(tmp_path, stream)
    lines = stream.getvalue().splitlines()
    steps = [int(line.split()[1].split("/")[0]) for line in lines if line.startswith("step")]
    assert steps == [1, 2, 3, 12], "a clock that shows half a second a look never reaches ten"
    assert sum(line.startswith("validation at step") for line in lines) == 3
    assert "acceptance 1.400" in stream.getvalue()
    assert "\r" not in stream.getvalue()


def test_a_log_file_gets_a_line_every_ten_seconds(tmp_path: Path) -> None:
    stream = io.StringIO()
    run_toy(tmp_path, stream, tick=4.0)
    assert len(re.findall(r"^step ", stream.getvalue(), re.MULTILINE)) > 4


def test_a_terminal_line_is_rewritten_and_closed(tmp_path: Path) -> None:
    stream = Terminal()
    run_toy(tmp_path, stream)
    lines = stream.getvalue().split("\n")
    assert lines[0].count("\r") == STEPS_PER_EPOCH
    assert lines[1].startswith("validation at step 4:")
    assert stream.getvalue().endswith("\n")


def test_one_nondecreasing_axis_of_optimizer_steps(tmp_path: Path) -> None:
    run_toy(tmp_path, io.StringIO())
    rows = read_metrics(tmp_path)
    steps = [row[X_AXIS] for row in rows]
    assert steps == sorted(steps)
    assert series(rows, "train/loss")[0] == [float(step) for step in range(1, 13)]
    assert series(rows, "val/acceptance_replay") == ([4.0, 8.0, 12.0], pytest.approx(SCORES))
    assert series(rows, "trainer/supervised_tokens")[1][-1] == 12 * 60
    assert series(rows, "trainer/epoch")[1][-1] == 3.0


def test_throughput_is_logged_under_its_names(tmp_path: Path) -> None:
    run_toy(tmp_path, io.StringIO())
    last = [row for row in read_metrics(tmp_path) if "train/loss" in row][-1]
    assert last["perf/tokens_per_s"] == pytest.approx(200.0)
    assert last["perf/supervised_tokens_per_s"] == pytest.approx(120.0)
    assert last["perf/data_wait_frac"] == pytest.approx(0.5)
    assert last["perf/read_GBps"] == pytest.approx(0.002)
    assert last["perf/step_s_p95"] == 0.5
    assert last["perf/eta_h"] == 0.0
    assert last["perf/mem_GiB"] > 0.05


@pytest.mark.parametrize(
    ("every_steps", "max_steps", "validated"),
    [
        (None, -1, [4, 8, 12]),
        (3, -1, [3, 4, 6, 8, 9, 12]),
        (5, -1, [4, 5, 8, 10, 12]),
        (None, 2, [2]),
        (3, 7, [3, 4, 6, 7]),
    ],
)
def test_validation_runs_at_ends_and_every_so_many_steps(
    every_steps: int | None, max_steps: int, validated: list[int], tmp_path: Path
) -> None:
    total = max_steps if max_steps > 0 else 3 * STEPS_PER_EPOCH
    callbacks = [ValidationSchedule(every_steps, total), Throughput(total, STEPS_PER_EPOCH)]
    logger = CsvLogger(tmp_path / "metrics.csv")
    module = ToyModule([1.0] * 6)
    train_toy(tmp_path, module, callbacks=callbacks, loggers=[logger], max_steps=max_steps)
    assert series(read_metrics(tmp_path), "val/accuracy")[0] == validated


def test_counts_survive_a_checkpoint() -> None:
    before, after = Throughput(10, 5), Throughput(10, 5)
    before.steps_done, before.supervised_tokens = 7, 420
    after.load_state_dict(before.state_dict())
    assert (after.steps_done, after.supervised_tokens) == (7, 420)
