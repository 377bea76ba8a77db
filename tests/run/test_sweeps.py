"""Comparing runs: made-up run folders, whose places, means and knobs are known by hand."""

from __future__ import annotations

import csv
import dataclasses
import json
import logging
import math
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from eagle3 import report as command
from eagle3.compose import entry_point, save_config
from eagle3.config import Config, LossTerm, OptimConfig
from eagle3.loggers import CsvLogger
from eagle3.report import Facts, write_report
from eagle3.reporting.comparison import as_override, compare
from eagle3.reporting.jobs import JobResult, find_jobs
from eagle3.reporting.pictures import lines_along
from eagle3.run_folder import FAILED_JOBS_FILE, append_failed_job

FACTS = Facts(
    name="made_up",
    exit_reason="finished",
    tokens_per_step=1024,
    total_steps=20,
    draft_steps=3,
    accelerator="cpu",
    device_hours=0.5,
    data_fingerprint="f00d",
    vocab_coverage=0.987,
    references={"bigram": {"accuracy": 0.2, "acceptance": 1.22}},
)


def made_run(
    folder: Path,
    lengths: Sequence[float],
    exit_reason: str | None = "finished",
    fingerprint: str = "f00d",
    **settings: Any,
) -> Path:
    """A run folder that validated ``lengths`` every ten steps; no exit reason: no summary."""
    folder.mkdir(parents=True)
    config = Config(**settings)
    save_config(dataclasses.replace(config, name=folder.name), folder / "config.yaml")
    logger = CsvLogger(folder / "metrics.csv")
    for index, length in enumerate(lengths, start=1):
        logger.log_metrics({"val/acceptance_replay": length, "val/accuracy": 0.3}, step=10 * index)
    if exit_reason is not None:
        facts = dataclasses.replace(
            FACTS, exit_reason=exit_reason, data_fingerprint=fingerprint, name=folder.name
        )
        write_report(folder, facts)
    return folder


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep_summary.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def plain(config: Config) -> Mapping[Any, Any]:
    tree = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    assert isinstance(tree, dict)
    return tree


def test_runs_are_ranked_and_what_was_cut_short_is_listed(tmp_path: Path) -> None:
    made_run(tmp_path / "a", [1.3, 1.2], lr=1e-4, ttt_steps=2)
    made_run(tmp_path / "b", [1.4, 1.5], lr=3e-4, ttt_steps=3)
    made_run(tmp_path / "c", [1.1], "early_stop", lr=1e-4, ttt_steps=3)
    made_run(tmp_path / "d", [1.9], "interrupted", lr=1e-3, ttt_steps=2)
    made_run(tmp_path / "e", [1.6, 1.7], None, lr=1e-3, ttt_steps=3)
    made_run(tmp_path / "f", [], "max_steps", lr=3e-4, ttt_steps=2)
    text = command.report([tmp_path])
    rows = table(tmp_path)
    assert [row["run"] for row in rows] == ["b", "a", "c", "f", "d", "e"]
    assert [row["best/acceptance_replay"] for row in rows] == [
        "1.5",
        "1.3",
        "1.1",
        "",
        "1.9",
        "1.7",
    ]
    assert [row["exit_reason"] for row in rows[-2:]] == ["interrupted", "unfinished"]
    assert (rows[0]["lr"], rows[0]["ttt_steps"], rows[0]["best/step"]) == ("0.0003", "3", "20")
    assert (rows[-1]["steps"], rows[-1]["best/step"]) == ("20", "20")
    assert "best: `lr=0.0003 ttt_steps=3`: 1.500 tokens per verifier pass (one run)" in text
    assert "| 1 | 0.0003 | 3 | 0 | 1.500 |" in text
    assert "| - | 0.0003 | 2 | 0 | - |" in text
    assert "| e | 0.001 | 3 | 0 | 20 | 1.700 | unfinished | - |" in text
    assert (tmp_path / "sweep_summary.md").read_text() in text


def test_seeds_are_a_mean_and_a_deviation_and_one_lucky_seed_does_not_win(tmp_path: Path) -> None:
    for seed, length in enumerate((1.2, 1.6)):
        made_run(tmp_path / f"a{seed}", [length], lr=1e-5, seed=seed)
    for seed, length in enumerate((1.5, 1.5, 1.5)):
        made_run(tmp_path / f"b{seed}", [length], lr=3e-5, seed=seed)
    text = command.report([tmp_path])
    best = table(tmp_path)[0]
    assert best["run"] == "a1"
    assert best["setting/seeds"] == "2"
    assert float(best["setting/mean"]) == pytest.approx(1.4)
    assert float(best["setting/deviation"]) == pytest.approx(0.4 / math.sqrt(2))
    assert "best: `lr=3e-5`: 1.500 ± 0.000 tokens per verifier pass (mean and dev" in text
    assert "| 1e-5 | 2 | 1.400 | 0.283 |" in text


def test_a_sweep_over_seeds_alone_has_no_knob(tmp_path: Path) -> None:
    made_run(tmp_path / "a", [1.2], seed=0)
    made_run(tmp_path / "b", [1.4], seed=1)
    text = command.report([tmp_path])
    assert "best: one setting, no knob differs: 1.300 ± 0.141" in text


def test_knobs_are_the_keys_that_change_what_is_trained(tmp_path: Path) -> None:
    made_run(tmp_path / "a", [1.2], optim=OptimConfig(eps=1e-8), resume="auto")
    made_run(tmp_path / "b", [1.3], loss=dataclasses.replace(Config().loss, mix=[LossTerm("ce")]))
    knobs = compare(find_jobs(tmp_path)).knobs
    assert "loss.mix" in knobs
    assert not {"name", "resume"} & set(knobs)
    assert "'loss.mix=[{name:ce,weight:1.0}]'" in command.report([tmp_path])


def test_other_data_is_said(tmp_path: Path) -> None:
    made_run(tmp_path / "a", [1.2], lr=1.0)
    made_run(tmp_path / "b", [1.3], fingerprint="beef")
    assert "2 different data sets" in command.report([tmp_path])


def test_a_failed_job_is_one_line_with_or_without_its_folder(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "a", [1.2], None, lr=1e-4)
    same = dataclasses.replace(Config(lr=1e-4), name=folder.name)
    for number, error, config in (
        (0, ValueError("the disk\nwent | away"), plain(same)),
        (1, TypeError("refused"), plain(Config(lr=2.0))),
        (2, KeyError("lr"), None),
    ):
        append_failed_job(
            tmp_path, number=number, error=error, overrides=["lr=fast", "-m"], config=config
        )
    jobs = {job.name: job for job in find_jobs(tmp_path)}
    assert set(jobs) == {"a", "job 1", "job 2"}
    assert (jobs["a"].exit_reason, jobs["a"].best) == ("error: ValueError", 1.2)
    assert jobs["a"].message == "the disk went | away"
    assert [jobs[name].settings["lr"] for name in jobs] == [1e-4, 2.0, "fast"]
    text = command.report([tmp_path])
    assert "best: none" in text
    assert r"the disk went \| away" in text


def test_runs_from_anywhere_are_compared_where_asked_and_counted_once(tmp_path: Path) -> None:
    away = (("x", 1.2), ("y", 1.4))
    runs = [made_run(tmp_path / name / "run", [length], lr=length) for name, length in away]
    assert command.main([str(tmp_path / "x"), *map(str, runs), "--out", str(tmp_path / "o")]) == 0
    rows = table(tmp_path / "o")
    assert [row["best/acceptance_replay"] for row in rows] == ["1.4", "1.2"]
    assert {row["setting/seeds"] for row in rows} == {"1"}


def test_the_picture_has_a_panel_for_each_knob(tmp_path: Path) -> None:
    """Beside the one with all curves; panels stand three in a row."""
    shapes = {}
    for name, settings in {
        "none": [{}, {"seed": 1}],
        "one": [{"lr": 1e-4}, {"lr": 1e-3}],
        "three": [{"lr": 1e-4}, {"ttt_steps": 2}, {"optim": OptimConfig(weight_decay=0.5)}],
    }.items():
        for index, values in enumerate(settings):
            made_run(tmp_path / name / str(index), [1.1, 1.2 + index], **values)
        command.report([tmp_path / name])
        shapes[name] = matplotlib.image.imread(tmp_path / name / "sweep_summary.png").shape[:2]
    height, width = shapes["none"]
    assert shapes["one"] == (height, 2 * width)
    assert shapes["three"] == (2 * height, 3 * width)


def test_lines_of_a_knob_hold_the_other_knobs_fixed(tmp_path: Path) -> None:
    for index, (lr, steps) in enumerate([(1.0, 2), (2.0, 2), (1.0, 3)]):
        made_run(tmp_path / str(index), [1.0 + index], lr=lr, ttt_steps=steps)
    lines = lines_along(compare(find_jobs(tmp_path)).settings, "lr")
    assert {k: [s.values["lr"] for s in v] for k, v in lines.items()} == {
        "ttt_steps=3": [1.0],
        "ttt_steps=2": [2.0, 1.0],
    }


def test_one_run_gives_its_curves_and_its_summary_again(tmp_path: Path) -> None:
    run = made_run(tmp_path / "a", [1.2, 1.3])
    drawn = (run / "curves.png").read_bytes()
    (run / "curves.png").unlink()
    text = command.report([run])
    assert (run / "curves.png").read_bytes() == drawn
    assert "- quality:  1.30 tokens per verifier pass" in text
    assert "| best/acceptance_replay | 1.3 |" in text
    assert (run / "summary.md").read_text() in text
    going = made_run(tmp_path / "b", [1.4], None)
    assert "- unfinished: figures so far" in command.report([going])
    assert "| best/acceptance_replay | 1.4 |" in (going / "summary.md").read_text()


@pytest.mark.parametrize(
    ("made", "said"),
    [("nothing", "no folder"), ("empty", "no job in"), ("run", "no metrics in")],
)
def test_bad_input_is_one_error(made: str, said: str, tmp_path: Path) -> None:
    folder = tmp_path / made
    if made == "empty":
        folder.mkdir()
    if made == "run":
        made_run(folder, [], None)
    done = subprocess.run(
        [sys.executable, "-m", "eagle3.report", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {said} {folder}")
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.rglob("*summary*"))


@given(st.lists(st.floats(1.0, 4.0) | st.none(), min_size=1, max_size=8), st.randoms())
def test_places_do_not_depend_on_the_order_of_the_jobs(
    lengths: list[float | None], shuffle: random.Random
) -> None:
    jobs = [
        JobResult(str(i), {"lr": float(i // 2), "seed": i % 2}, "finished", figures=figures)
        for i, length in enumerate(lengths)
        for figures in [{} if length is None else {"best/acceptance_replay": length}]
    ]
    first = compare(jobs)
    measured = [length for length in lengths if length is not None]
    assert [job.best for job in first.ranked[: len(measured)]] == sorted(measured, reverse=True)
    shuffle.shuffle(jobs)
    again = compare(jobs)
    assert [job.best for job in again.ranked] == [job.best for job in first.ranked]
    means = [setting.mean for setting in first.settings]
    assert [setting.mean for setting in again.settings] == pytest.approx(means)
    assert means == sorted(means, reverse=True)


@pytest.mark.parametrize(
    "value",
    [3e-4, 1e-5, 1e20, 2, None, True, "a b", "it's", [1, 2], "entering", {"name": "kl"}, "1,2"],
)
def test_an_override_is_read_back_by_hydra_as_the_same_value(value: Any) -> None:
    (override,) = OverridesParser.create().parse_overrides([f"key={as_override(value)}"])
    read = override.value()
    assert getattr(read, "text", read) == value


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Undo what an entry point does to its process: Hydra's logging and its environment."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    yield monkeypatch
    root.handlers[:], root.level = handlers, level


def test_jobs_of_a_sweep_are_reported_once_and_failures_recorded(
    tmp_path: Path, command_line: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failing summary changes no exit code; a single run has none."""
    seen: list[Path] = []

    def job(config: Config, _: object) -> float:
        if config.seed == 1:
            raise RuntimeError("seed one")
        return 0.0

    def after_sweep(folder: Path) -> None:
        seen.append(folder)
        raise RuntimeError("no summary")

    output = f"paths.output={tmp_path}"
    command_line.setattr("sys.argv", ["train", "-m", "seed=0,1,2", output])
    assert entry_point(job, after_sweep) == 1
    (folder,) = seen
    (failure,) = map(json.loads, (folder / FAILED_JOBS_FILE).read_text().splitlines())
    assert (failure["number"], failure["message"]) == (1, "seed one")
    assert failure["config"]["seed"] == 1
    assert "seed=1" in failure["overrides"]
    command_line.setattr("sys.argv", ["train", "-m", "seed=0,2", output])
    assert entry_point(job, after_sweep) == 0
    command_line.setattr("sys.argv", ["train", "seed=0", output])
    assert entry_point(job, after_sweep) == 0
    assert len(seen) == 2
    assert "no summary" in capsys.readouterr().err
