"""Run folders: names, what they record, and what two runs may not share."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest

from eagle3.compose import Job, load_config
from eagle3.config import Config, PathsConfig
from eagle3.errors import ConfigError
from eagle3.provenance import git_state, load_run, run_name, start_run
from eagle3.run_folder import read_json, write_json


def config_in(folder: Path) -> Config:
    return Config(name="kimi_100k", paths=PathsConfig(output=str(folder)))


def test_the_name_holds_the_knobs() -> None:
    assert (
        run_name(Config(name="kimi_100k"), "ab12") == "kimi_100k_lr3e-5_L4096_S3_n0.05_e5_s0_ab12"
    )


@pytest.mark.parametrize(
    ("rate", "text"),
    [(1e-3, "lr1e-3"), (2.5e-4, "lr2.5e-4"), (3.14159e-5, "lr3.14e-5"), (1.0, "lr1e0")],
)
def test_rates_are_short(rate: float, text: str) -> None:
    assert f"_{text}_" in run_name(dataclasses.replace(Config(), lr=rate), "ab12")


def test_a_run_records_what_runs(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    run = start_run(config, Job(experiment="kimi_100k"))
    assert run.directory.parent == tmp_path
    assert run.name.endswith(run.id[:4])
    assert run.group == "kimi_100k"
    assert load_config(run.directory / "config.yaml") == config
    record = read_json(run.directory, "provenance.json")
    assert record["packages"]["lightning"]
    assert record["packages"]["omegaconf"]
    assert {"command", "git", "host", "python", "torch", "cuda", "cpu_count"} <= record.keys()


def test_other_ranks_see_the_same_run(tmp_path: Path) -> None:
    run = start_run(config_in(tmp_path), Job())
    assert load_run(run.directory, is_main=True) == run
    assert load_run(run.directory, is_main=False) == dataclasses.replace(run, is_main=False)


def test_jobs_of_a_sweep_lie_in_its_folder_and_group(tmp_path: Path) -> None:
    job = Job(sweep_dir=tmp_path / "sweep_1", experiment="kimi_100k")
    runs = [start_run(config_in(tmp_path), job) for _ in range(2)]
    assert {run.directory.parent for run in runs} == {job.sweep_dir}
    assert {run.group for run in runs} == {"sweep_1"}
    assert runs[0].id != runs[1].id


def test_equal_suffixes_do_not_share_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = iter(["ab12000000", "ab12111111", "cd34000000"])
    monkeypatch.setattr("secrets.token_hex", lambda _: next(drawn))
    runs = [start_run(config_in(tmp_path), Job()) for _ in range(2)]
    assert [run.id for run in runs] == ["ab12000000", "cd34000000"]


def test_a_folder_that_cannot_be_made_names_the_override(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"paths\.output="):
        start_run(config_in(tmp_path / "file"), Job())


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    write_json(tmp_path, "summary.json", {"a": float("nan"), "b": 1.5})
    assert read_json(tmp_path, "summary.json") == {"a": None, "b": 1.5}


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_git_state_is_that_of_the_package(tmp_path: Path) -> None:
    package = tmp_path / "eagle3"
    package.mkdir()
    (package / "__init__.py").touch()
    assert git_state(package) == (None, None)
    git(tmp_path, "init")
    assert git_state(package) == (None, None), "an untracked package is not of this checkout"
    git(tmp_path, "add", "eagle3")
    git(tmp_path, "commit", "-m", "first")
    revision, dirty = git_state(package)
    assert revision is not None
    assert len(revision) == 40
    assert dirty is False
    (tmp_path / "notes.txt").touch()
    assert git_state(package) == (revision, False), "what is not code does not make it dirty"
    (package / "new.py").touch()
    assert git_state(package) == (revision, True)
