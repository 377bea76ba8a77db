"""Train a drafter: ``python -m eagle3.train experiment=smollm2_quickstart``."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

from eagle3.checks import check, check_paths, device_count
from eagle3.compose import Job, entry_point
from eagle3.config import Config
from eagle3.distributed import must_launch, process_group, resolve_accelerator, shared_run
from eagle3.launch import launch_ranks
from eagle3.names import RankStart, RehearsalPlace
from eagle3.resume import begin, finished
from eagle3.run_folder import best_value
from eagle3.slurm_ranks import join_srun
from eagle3.terminal import JobFailedError


def train(config: Config, job: Job) -> float:
    """Run one job, on this process or on ranks of its own.

    Returns:
        The best ``val/acceptance_replay``, which sweepers maximise; 0 without a validation.
    """
    if config.rehearsal.place is not RehearsalPlace.off:
        from eagle3.rehearsing.staging import rehearse  # torch, which others need not wait for

        return rehearse(config, partial(_train, job=job))
    return _train(config, job)


def _train(config: Config, job: Job) -> float:
    if config.trainer.start is RankStart.srun:
        join_srun(os.environ, in_sweep=job.sweep_dir is not None)
    check(config)
    check_paths(config)
    done = finished(config, job)
    if done is not None:
        return done
    if must_launch(config):
        return _train_on_ranks(config, job)
    with process_group(config) as ranks:
        from eagle3.fit import fit  # seconds of imports that a mistyped command need not wait for

        return fit(config, shared_run(config, job, ranks))


def _train_on_ranks(config: Config, job: Job) -> float:
    resolve_accelerator(config.trainer)  # says here, not once per rank, which cards are missing
    run = begin(config, job)
    code = launch_ranks(run.directory, device_count(config.trainer.devices))
    if code == os.EX_TEMPFAIL:  # stopped by a signal, which the rest of a sweep is to obey too
        raise SystemExit(code)
    if code:
        raise JobFailedError(code)
    return best_value(run.directory)


def report_sweep(sweep_dir: Path) -> None:
    """Write ``sweep_summary.*`` into the sweep's folder and print its best line."""
    from eagle3.reporting.sweep import NAME, write_sweep_summary  # draws, which imports a lot

    lines = write_sweep_summary([sweep_dir], sweep_dir).splitlines()
    print(*(line for line in lines if line.startswith("best:")), sep="\n")
    print(f"sweep:    {sweep_dir / NAME}.md")


if __name__ == "__main__":
    sys.exit(entry_point(train, report_sweep))
