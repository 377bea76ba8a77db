"""The CSV file, and real W&B offline: one run a job, ended with its code, never a crash."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3.config import Config, LoggerConfig, PathsConfig
from eagle3.loggers import CsvLogger, start_loggers, wandb_mode
from eagle3.names import WandbMode
from eagle3.provenance import Run
from eagle3.run_folder import X_AXIS, read_metrics
from tests.run.wandb_file import read_offline_run
from tests.tiny_run import clean_environment

ROOT = Path(__file__).parents[2]


def test_a_row_is_on_disk_at_once(tmp_path: Path) -> None:
    logger = CsvLogger(tmp_path / "metrics.csv")
    logger.log_metrics({"train/loss": 2.5}, step=1)
    assert read_metrics(tmp_path) == [{X_AXIS: 1.0, "train/loss": 2.5}]


def test_late_columns_keep_the_rows_before_them(tmp_path: Path) -> None:
    logger = CsvLogger(tmp_path / "metrics.csv")
    logger.log_metrics({"train/loss": 2.5}, step=1)
    logger.log_metrics({"val/loss": 2.0, "val/accuracy": 0.5}, step=1)
    logger.log_metrics({"train/loss": 1.5}, step=2)
    assert read_metrics(tmp_path) == [
        {X_AXIS: 1.0, "train/loss": 2.5},
        {X_AXIS: 1.0, "val/loss": 2.0, "val/accuracy": 0.5},
        {X_AXIS: 2.0, "train/loss": 1.5},
    ]
    with (tmp_path / "metrics.csv").open() as file:
        assert next(csv.reader(file))[0] == X_AXIS
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_large_counts_are_written_exactly(tmp_path: Path) -> None:
    CsvLogger(tmp_path / "metrics.csv").log_metrics({"trainer/supervised_tokens": 412_345_678}, 1)
    assert read_metrics(tmp_path)[0]["trainer/supervised_tokens"] == 412_345_678


@pytest.mark.parametrize(
    ("environment", "mode"),
    [
        pytest.param({}, "offline", id="nothing"),
        pytest.param({"WANDB_API_KEY": "k"}, "online", id="key"),
        pytest.param({"WANDB_API_KEY": ""}, "offline", id="empty key"),
        pytest.param({"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, "offline", id="mode"),
        pytest.param({"NETRC": "api.wandb.ai"}, "online", id="netrc"),
        pytest.param({"NETRC": "github.com"}, "offline", id="netrc of others"),
        pytest.param(
            {"NETRC": "w.org", "WANDB_BASE_URL": "https://w.org"}, "online", id="own server"
        ),
        pytest.param(
            {"NETRC": "api.wandb.ai", "WANDB_BASE_URL": "https://w.org"}, "offline", id="other host"
        ),
    ],
)
def test_auto_is_online_only_with_a_key(
    environment: dict[str, str], mode: str, tmp_path: Path
) -> None:
    host = environment.get("NETRC")
    netrc = tmp_path / "netrc"
    if host is not None:
        netrc.write_text(f"machine {host} login user password secret\n")
        netrc.chmod(0o600)
    assert wandb_mode(WandbMode.auto, environment | {"NETRC": str(netrc)}) == mode


def test_a_named_mode_is_kept() -> None:
    assert wandb_mode(WandbMode.offline, {"WANDB_API_KEY": "k"}) is WandbMode.offline


def test_other_ranks_log_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise AssertionError("only global rank 0 starts W&B")

    monkeypatch.setattr("wandb.init", refuse)
    config = Config(logger=LoggerConfig(wandb=WandbMode.offline))
    loggers = start_loggers(config, Run(tmp_path, "name", "id", "group", is_main=False))
    loggers.summary({"best/step": 1})
    loggers.finish(exit_code=0)
    assert loggers.lightning == []
    assert list(tmp_path.iterdir()) == []


def test_a_wandb_that_cannot_start_costs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise OSError("no space left\non this device")

    monkeypatch.setattr("wandb.init", fail)
    config = Config(logger=LoggerConfig(wandb=WandbMode.offline))
    loggers = start_loggers(config, Run(tmp_path, "name", "id", "group"))
    assert [type(logger) for logger in loggers.lightning] == [CsvLogger]
    (line,) = capsys.readouterr().out.splitlines()
    assert "no space left" in line
    assert "metrics.csv" in line
    loggers.finish(exit_code=0)


TWO_JOBS = """
import dataclasses, json, sys
from pathlib import Path
from eagle3.callbacks import Throughput
from eagle3.compose import Job
from eagle3.config import Config, PathsConfig
from eagle3.loggers import start_loggers
from eagle3.provenance import start_run
from tests.run.toy import STEPS_PER_EPOCH, ToyModule, train_toy
import wandb

config = Config(paths=PathsConfig(output=sys.argv[1]))
folders = []
for raise_at in (6, None):
    run = start_run(config, Job(sweep_dir=Path(sys.argv[1]) / "sweep"))
    loggers = start_loggers(config, run)
    code = 1
    try:
        module = ToyModule([1.2, 1.4, 1.3], raise_at=raise_at)
        throughput = Throughput(3 * STEPS_PER_EPOCH, STEPS_PER_EPOCH)
        train_toy(run.directory, module, callbacks=[throughput], loggers=loggers.lightning)
        loggers.summary({"best/acceptance_replay": 1.4})
        code = 0
    except RuntimeError as error:
        print("job failed:", error)
    finally:
        loggers.finish(exit_code=code)
    folders.append([str(run.directory), run.id])
    assert wandb.run is None
print(json.dumps(folders))
"""


def test_two_jobs_of_a_process_are_two_runs_also_when_the_first_fails(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWO_JOBS, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=clean_environment() | {"HOME": str(tmp_path)},
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "job failed: a step went wrong" in done.stdout
    jobs = json.loads(done.stdout.splitlines()[-1])
    runs = [read_offline_run(Path(folder)) for folder, _ in jobs]
    assert [run.id for run in runs] == [identity for _, identity in jobs]
    assert runs[0].id != runs[1].id
    assert [run.exit_code for run in runs] == [1, 0]
    assert {(run.group, run.job_type) for run in runs} == {("sweep", "train")}
    for run, steps in zip(runs, (6, 12), strict=True):
        axis = [float(row[X_AXIS]) for row in run.history]
        assert axis == sorted(axis)
        assert axis[-1] == steps
    judged = [row[X_AXIS] for row in runs[1].history if "val/acceptance_replay" in row]
    assert judged == ["4", "8", "12"]


def test_disabled_writes_the_csv_only(tmp_path: Path) -> None:
    config = Config(
        logger=LoggerConfig(wandb=WandbMode.disabled), paths=PathsConfig(output=str(tmp_path))
    )
    loggers = start_loggers(config, Run(tmp_path, "name", "id", "group"))
    assert loggers.wandb_run is None
    assert len(loggers.lightning) == 1


def test_rows_after_the_checkpoint_are_cut_and_written_once(tmp_path: Path) -> None:
    first = CsvLogger(tmp_path / "metrics.csv")
    for step in range(1, 6):
        first.log_metrics({"train/loss": 1 / step}, step)
    first.log_metrics({"val/loss": 0.1}, 5)
    before = (tmp_path / "metrics.csv").read_bytes()
    second = CsvLogger(tmp_path / "metrics.csv")
    cut = second.go_on_after(3)
    assert [row[X_AXIS] for row in cut] == [4, 5, 5]
    assert second.rows == len(read_metrics(tmp_path)) == 3
    for step in (4, 5):
        second.log_metrics({"train/loss": 1 / step}, step)
    second.log_metrics({"val/loss": 0.1}, 5)
    assert (tmp_path / "metrics.csv").read_bytes() == before


def test_a_disk_that_was_away_gets_the_rows_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    logger = CsvLogger(folder / "metrics.csv")
    logger.log_metrics({"train/loss": 1.0}, 1)
    folder.rename(tmp_path / "away")
    logger.log_metrics({"train/loss": 0.5}, 2)
    logger.log_metrics({"train/loss": 0.4}, 3)
    assert capsys.readouterr().out.count("metrics.csv cannot be written now") == 1
    (tmp_path / "away").rename(folder)
    logger.log_metrics({"train/loss": 0.3}, 4)
    assert [row[X_AXIS] for row in read_metrics(folder)] == [1, 2, 3, 4]


CONTINUED = """
import sys, torch
from eagle3.compose import Job
from eagle3.config import Config, PathsConfig
from eagle3.loggers import start_loggers
from eagle3.provenance import continue_run, start_run

config = Config(paths=PathsConfig(output=sys.argv[1]))

def log(run, steps):
    loggers = start_loggers(config, run)
    for step in steps:
        for logger in loggers.lightning:
            logger.log_metrics({"train/loss": 1 / step}, step)
            if step % 3 == 0:
                logger.log_metrics({"val/loss": 2 / step}, step)
        if step == 4:
            state = {"CheckpointPolicy": {"rows": loggers.rows()}}
            torch.save({"global_step": 4, "callbacks": state}, path)
    loggers.finish(exit_code=0)

run = start_run(config, Job())
path = run.directory / "checkpoints" / "step00000004.ckpt"
path.parent.mkdir()
log(run, range(1, 7))
(run.directory / "wandb").rename(run.directory / "before")
again = continue_run(config, run.directory, path)
assert again.id == run.id
log(again, range(5, 10))
print(run.directory)
"""


def test_a_continued_run_logs_each_row_once_to_wandb_too(tmp_path: Path) -> None:
    """Six steps, killed; on from the fourth: only what comes after the sixth is new."""
    done = subprocess.run(
        [sys.executable, "-c", CONTINUED, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=clean_environment() | {"HOME": str(tmp_path)},
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = Path(done.stdout.splitlines()[-1])
    second = read_offline_run(folder)
    (folder / "wandb").rename(folder / "after")
    (folder / "before").rename(folder / "wandb")
    first = read_offline_run(folder)
    assert first.id == second.id
    logged = [(int(row[X_AXIS]), "val/loss" in row) for row in first.history + second.history]
    expected = [(step, False) for step in range(1, 10)] + [(step, True) for step in (3, 6, 9)]
    expected.sort()
    assert logged == expected
    assert [(int(r[X_AXIS]), "val/loss" in r) for r in read_metrics(folder)] == expected
