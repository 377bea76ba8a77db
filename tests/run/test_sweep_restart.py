"""A sweep that is started again: what has finished is taken over, what has not goes on."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
from pathlib import Path

import pytest

from eagle3.compose import Job
from eagle3.config import Config, MixturePart, PathsConfig
from eagle3.provenance import start_run
from eagle3.reporting.jobs import find_jobs
from eagle3.resume import finished
from eagle3.run_folder import read_elsewhere, read_json, write_json
from tests.run.test_gpu_pool import wait_for
from tests.tiny_run import clean_environment, make_world, some_documents


def config_in(folder: Path) -> Config:
    paths = PathsConfig(output=str(folder / "runs"), shards=str(folder / "shards"))
    return dataclasses.replace(Config(name="job"), paths=paths, resume="auto")


def ended(config: Config, sweep: Path, reason: str, best: float | None) -> Path:
    run = start_run(config, Job(sweep_dir=sweep))
    write_json(
        run.directory, "summary.json", {"exit_reason": reason, "best/acceptance_replay": best}
    )
    return run.directory


def test_only_what_was_not_cut_short_is_taken_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_in(tmp_path)
    before, now = tmp_path / "runs" / "sweep_1", tmp_path / "runs" / "sweep_2"
    ended(config, before, "interrupted", 1.9)
    assert finished(config, Job(now)) is None
    run = ended(config, before, "finished", 1.25)
    assert finished(config, Job(now)) == 1.25
    assert read_elsewhere(now) == [run]
    assert "has finished with 1.250, so it is not trained" in capsys.readouterr().out
    assert finished(config, Job()) is None, "a single run is asked for by hand"
    assert finished(dataclasses.replace(config, resume=None), Job(now)) is None
    assert finished(dataclasses.replace(config, lr=1.0), Job(now)) is None
    assert finished(config, Job(now)) == 1.25
    assert [job.best for job in find_jobs(now)] == [1.25], "twice taken over is one run"


def test_other_data_under_the_same_settings_are_trained(tmp_path: Path) -> None:
    config, now = config_in(tmp_path), Job(tmp_path / "runs" / "sweep_2")
    ended(config, tmp_path / "runs" / "sweep_1", "max_steps", None)
    assert finished(config, now) == 0.0
    for paths in (
        dataclasses.replace(config.paths, shards=str(tmp_path / "recaptured")),
        dataclasses.replace(config.paths, vocab_map=str(tmp_path / "map")),
    ):
        assert finished(dataclasses.replace(config, paths=paths), now) is None
    mixture = [MixturePart(str(tmp_path / "a"))]
    mixed = dataclasses.replace(config, data=dataclasses.replace(config.data, mixture=mixture))
    ended(mixed, tmp_path / "runs" / "sweep_1", "finished", 1.5)
    assert finished(mixed, now) == 1.5
    moved = [MixturePart(str(tmp_path / "b"))]
    assert (
        finished(
            dataclasses.replace(config, data=dataclasses.replace(config.data, mixture=moved)), now
        )
        is None
    )


@pytest.mark.ddp
def test_a_stopped_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    """SIGTERM while the second of two jobs trains; the same command then ends both, once each."""
    world = make_world(tmp_path, some_documents(12))
    command = world.command(
        *("-m", "hydra/launcher=gpu_pool", "hydra.launcher.slots=1", "resume=auto"),
        *("epochs=1,40", "max_seq_len=32", "ttt_steps=1", "preflight=off"),
    )
    output = tmp_path / "output"
    with (
        output.open("w") as file,
        subprocess.Popen(
            command, cwd=tmp_path, env=clean_environment(), stdout=file, stderr=file
        ) as process,
    ):
        wait_for(lambda: bool(list(tmp_path.glob("runs/*/*_e40_*/metrics.csv"))))
        process.send_signal(signal.SIGTERM)
    assert process.returncode == os.EX_TEMPFAIL, output.read_text()
    runs = {path.parent for path in tmp_path.glob("runs/*/*/config.yaml")}
    (whole,) = [run for run in runs if "_e1_" in run.name]
    before = (whole / "provenance.json").read_bytes()

    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.parent for path in tmp_path.glob("runs/*/*/config.yaml")} == runs
    assert (whole / "provenance.json").read_bytes() == before
    assert {read_json(run, "summary.json")["exit_reason"] for run in runs} == {"finished"}
    newest = max(tmp_path.glob("runs/sweep_*"))
    assert {job.folder for job in find_jobs(newest)} == runs
    assert "has finished with" in (newest / "jobs" / "0.log").read_text()
    assert "goes on after step" in (newest / "jobs" / "1.log").read_text()
    assert (newest / "sweep_summary.md").is_file()
