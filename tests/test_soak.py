"""The long series of kills: where it kills, and what it takes for a fault; itself: make soak."""

from __future__ import annotations

import csv
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.soak import SAVE_EVERY, Kill, Series, faults_of, kill_points, last_step, write_csv

KILL = Kill(2, 1, "all", 19, 20, 16, "step00000016.ckpt", mid_epoch=True, in_a_write=False)
FINE = Series((KILL, KILL), weights_equal=True, metrics_equal=True, best_equal=True)


@given(st.integers(80, 400), st.integers(1, 30), st.integers(0, 99))
def test_kills_lie_after_a_save_and_before_the_next(total: int, kills: int, seed: int) -> None:
    points = kill_points(total, kills, random.Random(seed))
    assert len(set(points)) == kills
    assert points == sorted(points)
    latest = total - 2 * SAVE_EVERY
    assert all(SAVE_EVERY < point < latest and point % SAVE_EVERY for point in points)
    assert points == kill_points(total, kills, random.Random(seed))


def test_a_series_without_fault_has_none() -> None:
    assert faults_of(FINE) == []


@pytest.mark.parametrize(
    ("series", "fault"),
    [
        pytest.param(replace(FINE, weights_equal=False), "weights differ", id="weights"),
        pytest.param(replace(FINE, metrics_equal=False), "history differs", id="metrics"),
        pytest.param(replace(FINE, best_equal=False), "best checkpoint differs", id="best"),
        pytest.param(
            replace(FINE, kills=(replace(KILL, resumed_step=0),)), "go on from", id="begun_anew"
        ),
        pytest.param(
            replace(FINE, kills=(replace(KILL, resumed_step=20),)), "at a save", id="at_a_save"
        ),
        pytest.param(
            replace(FINE, kills=(KILL, *[replace(KILL, mid_epoch=False)] * 2)),
            "fewer than half",
            id="epoch_ends",
        ),
    ],
)
def test_each_fault_is_named(series: Series, fault: str) -> None:
    (found,) = faults_of(series)
    assert fault in found
    assert found.startswith("2 rank(s): ")


def test_a_row_that_is_half_written_is_not_counted(tmp_path: Path) -> None:
    assert last_step(tmp_path) == 0
    path = tmp_path / "metrics.csv"
    path.write_text("trainer/global_step,train/loss\n")
    assert last_step(tmp_path) == 0
    path.write_text("trainer/global_step,train/loss\n1,3.5\n2,3.25\n3,2")
    assert last_step(tmp_path) == 2


def test_kills_are_kept_as_a_table(tmp_path: Path) -> None:
    write_csv(tmp_path / "kills.csv", [KILL])
    with (tmp_path / "kills.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (row["ranks"], row["checkpoint"], row["mid_epoch"]) == ("2", KILL.checkpoint, "True")
