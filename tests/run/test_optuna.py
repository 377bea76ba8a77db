"""``hydra/sweeper=optuna`` as a user calls it: maximises, goes on after failures, repeats."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from eagle3.run_folder import read_json
from tests.run.test_gpu_pool import REPOSITORY, environment, notes
from tests.tiny_run import make_world, some_documents

pytestmark = pytest.mark.ddp

SEARCH = ("-m", "hydra/sweeper=optuna", "lr=tag(log,interval(1e-3,1e-1))")


def results(sweep: Path) -> dict[str, Any]:
    found = OmegaConf.to_container(OmegaConf.load(sweep / "optimization_results.yaml"))
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def search(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    return subprocess.run(
        [
            *(sys.executable, "-m", "tests.run.pool_command", *SEARCH),
            *(f"paths.output={folder}", *overrides),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        env=environment(),
        timeout=300,
    )


def tried(folder: Path) -> list[float]:
    """The learning rate of each job, in the order of the jobs."""
    overrides = [note["overrides"] for _, note in sorted(notes(folder, "started").items())]
    return [float(o.split("=")[1]) for given in overrides for o in given if o.startswith("lr=")]


def test_it_maximises_and_proposes_the_same_again(tmp_path: Path) -> None:
    """In a pool and one after the other; the objective is highest at lr=0.02."""
    pool = ("hydra/launcher=gpu_pool", "hydra.launcher.slots=2")
    for name, launcher in (("pool", pool), ("serial", ())):
        done = search(
            tmp_path / name,
            *("hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=2", "name=plain", *launcher),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("swept ") == 1
        (sweep,) = (tmp_path / name).glob("sweep_*")
        rates = tried(tmp_path / name)
        assert len(rates) == 4
        assert results(sweep)["best_params"]["lr"] == min(rates, key=lambda lr: abs(lr - 0.02))
    assert tried(tmp_path / "pool") == tried(tmp_path / "serial")


def test_a_trial_that_fails_is_told_and_the_search_goes_on(tmp_path: Path) -> None:
    done = search(tmp_path / "runs", "hydra.sweeper.n_trials=3", "name=plain_fails_plain")
    assert done.returncode == 7, done.stdout + done.stderr
    assert set(notes(tmp_path / "runs", "ended")) == {0, 2}


def test_three_trials_of_a_real_run(tmp_path: Path) -> None:
    world = make_world(tmp_path, some_documents(8))
    world.run(
        *("-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=3"),
        *("optim.weight_decay=interval(0.0,0.5)", "epochs=1", "max_seq_len=64", "preflight=off"),
    )
    (sweep,) = (tmp_path / "runs").iterdir()
    runs = [path for path in sweep.iterdir() if (path / "config.yaml").exists()]
    decays = {OmegaConf.load(run / "config.yaml").optim.weight_decay for run in runs}
    bests = [read_json(run, "summary.json")["best/acceptance_replay"] for run in runs]
    assert len(decays) == len(runs) == 3
    assert results(sweep)["best_value"] == max(bests)
    assert results(sweep)["best_params"]["optim.weight_decay"] in decays
