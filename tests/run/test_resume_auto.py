"""Which folder ``resume`` trains in: the newest of the job that did not finish, and is whole."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from eagle3.compose import Job, load_config
from eagle3.config import Config, DataConfig, LoggerConfig, MixturePart, PathsConfig
from eagle3.errors import ConfigError
from eagle3.provenance import Run, job_fingerprint, load_run, start_run
from eagle3.resume import Saved, begin, only_process_in
from eagle3.run_folder import checkpoints, read_json, write_json
from eagle3.slurm import requeue


def config_in(folder: Path, resume: str | None = "auto") -> Config:
    paths = PathsConfig(output=str(folder / "runs"))
    return dataclasses.replace(Config(name="job"), paths=paths, resume=resume)


def save(folder: Path, step: int, name: str | None = None) -> Path:
    """A checkpoint as small as one can be; 10 rows of metrics a step."""
    path = checkpoints(folder) / (name or f"step{step:08d}.ckpt")
    path.parent.mkdir(exist_ok=True)
    state = {"CheckpointPolicy": {"rows": 10 * step}}
    torch.save({"global_step": step, "callbacks": state, "w": torch.arange(5000.0)}, path)
    return path


def begun(config: Config, *steps: int, job: Job | None = None) -> Run:
    run = start_run(config, job or Job())
    for step in steps:
        save(run.directory, step)
    return run


def test_without_a_run_of_the_job_it_begins_anew_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_in(tmp_path)
    begun(dataclasses.replace(config, seed=5), 3)
    run = begin(config, Job())
    assert run.checkpoint is None
    assert not run.continues
    assert "resume=auto: found no run of this job" in capsys.readouterr().out


def test_the_newest_checkpoint_of_the_newest_unfinished_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_in(tmp_path)
    begun(config, 50)
    newest = begun(config, 3, 12, 7)
    save(newest.directory, 5, "best.ckpt")
    begun(dataclasses.replace(config, lr=1.0), 60)
    finished = begun(config, 70)
    write_json(finished.directory, "summary.json", {"exit_reason": "finished"})
    write_json(newest.directory, "summary.json", {"exit_reason": "interrupted"})
    for later, run in enumerate((newest, finished)):
        os.utime(run.directory / "provenance.json", (2e9 + later, 2e9 + later))
    run = begin(config, Job())
    assert run.directory == newest.directory
    assert run.id == newest.id
    assert run.continues
    assert run.checkpoint == checkpoints(newest.directory) / "step00000012.ckpt"
    assert "goes on after step 12" in capsys.readouterr().out
    assert load_run(run.directory, is_main=True) == run
    (attempt,) = read_json(run.directory, "provenance.json")["continued"]
    assert attempt["from"] == "step00000012.ckpt"
    assert Saved.read(run.checkpoint).rows == 120


def test_a_best_that_is_newer_than_the_rest_is_taken(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    folder = begun(config, 3).directory
    best = save(folder, 9, "best.ckpt")
    assert begin(config, Job()).checkpoint == best
    save(folder, 9)
    assert begin(config, Job()).checkpoint == checkpoints(folder) / "step00000009.ckpt"


@pytest.mark.parametrize("damage", ["cut", "empty", "one byte", "text"])
def test_damaged_checkpoints_are_passed_over_by_name(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_in(tmp_path)
    folder = begun(config, 3, 6).directory
    path = save(folder, 9)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(
        {
            "cut": path.read_bytes()[:-500],
            "empty": b"",
            "one byte": bytes(content),
            "text": b"no checkpoint",
        }[damage]
    )
    assert begin(config, Job()).checkpoint == checkpoints(folder) / "step00000006.ckpt"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: passed over")
    assert str(path) in line
    with pytest.raises(ConfigError, match=r"step00000009.ckpt: found no whole checkpoint"):
        begin(config_in(tmp_path, str(path)), Job())


def test_a_run_that_saved_nothing_is_passed_over(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    older = begun(config, 4)
    begun(config)
    assert begin(config, Job()).directory == older.directory


def test_jobs_of_a_sweep_are_found_in_the_sweep_before(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    before, now = (Job(sweep_dir=tmp_path / "runs" / name) for name in ("sweep_1", "sweep_2"))
    jobs = [dataclasses.replace(config, seed=seed) for seed in range(3)]
    runs = [begun(job, 4, job=before) for job in jobs[:2]]
    found = [begin(job, now) for job in jobs]
    assert [run.directory for run in found[:2]] == [run.directory for run in runs]
    assert found[0].group == "sweep_1"
    assert found[2].directory.parent.name == "sweep_2"


def test_moved_data_and_other_loggers_are_the_same_job(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    folder = begun(config, 4).directory
    paths = dataclasses.replace(config.paths, shards="/elsewhere", cache="/tmp/cache")
    moved = dataclasses.replace(config, paths=paths, logger=LoggerConfig(project="other"))
    run = begin(moved, Job())
    assert run.directory == folder
    assert load_config(folder / "config.yaml").paths.shards == "/elsewhere", "ranks read it there"


def test_the_fingerprint_knows_weights_but_not_places_of_a_mixture() -> None:
    def fingerprint(path: str, weight: float) -> str:
        return job_fingerprint(Config(data=DataConfig(mixture=[MixturePart(path, weight)])))

    assert fingerprint("/a", 1.0) == fingerprint("/b", 1.0) != fingerprint("/a", 0.5)


def test_a_named_checkpoint_goes_on_in_its_folder_or_in_a_new_one(tmp_path: Path) -> None:
    folder = begun(config_in(tmp_path), 4, 8).directory
    path = checkpoints(folder) / "step00000004.ckpt"
    same = begin(config_in(tmp_path, str(path)), Job())
    assert (same.directory, same.checkpoint, same.continues) == (folder, path, True)
    other = begin(dataclasses.replace(config_in(tmp_path, str(path)), lr=1.0), Job())
    assert other.directory != folder
    assert (other.checkpoint, other.continues) == (path, False)
    copy = tmp_path / "copy.ckpt"
    copy.write_bytes(path.read_bytes())
    alone = begin(config_in(tmp_path, str(copy)), Job())
    assert alone.directory != folder
    assert (alone.checkpoint, alone.continues) == (copy, False)


def test_a_folder_that_another_process_trains_in_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other one ends while we wait, and has finished the run by then."""
    config = config_in(tmp_path)
    live = begun(config, 4)
    script = f"""
import sys
from pathlib import Path
from eagle3.provenance import load_run
from eagle3.resume import only_process_in
from eagle3.run_folder import write_json
run = load_run(Path({str(live.directory)!r}), is_main=True)
with only_process_in(run):
    print("held", flush=True)
    sys.stdin.readline()
    write_json(run.directory, "summary.json", {{"exit_reason": "max_steps"}})
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "held\n"
        threading.Timer(0.5, lambda: print("end", file=other.stdin, flush=True)).start()
        assert begin(config, Job()).directory != live.directory
    assert "waiting: another process holds" in capsys.readouterr().out


def test_other_ranks_do_not_hold_the_folder(tmp_path: Path) -> None:
    run = begun(config_in(tmp_path), 4)
    with only_process_in(dataclasses.replace(run, is_main=False)):
        assert not (run.directory / ".lock").exists()


@pytest.mark.parametrize(
    ("environment", "asked"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7"}, "requeue 7"),
        (
            {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"},
            "requeue 7_2",
        ),
    ],
)
def test_slurm_is_asked_for_the_same_job(
    environment: dict[str, str],
    asked: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    requeue(environment)
    found = tmp_path / "asked"
    assert (found.read_text().strip() if found.exists() else None) == asked


@pytest.mark.parametrize("refusal", ["missing", "refused"])
def test_a_job_that_may_not_be_requeued_is_told(
    refusal: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if refusal == "refused":
        (tmp_path / "scontrol").write_text("#!/bin/sh\necho Job is not requeueable >&2\nexit 1\n")
        (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")
    requeue({"SLURM_JOB_ID": "7"})
    said = capsys.readouterr().out
    assert "Slurm does not start job 7 again" in said
    assert ("not requeueable" in said) == (refusal == "refused")
