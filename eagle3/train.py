"""Train a drafter: ``python -m eagle3.train experiment=smollm2_quickstart``."""

from __future__ import annotations

import sys

from eagle3.checks import check
from eagle3.compose import Job, JobFailed, entry_point
from eagle3.config import Config
from eagle3.distributed import launch_ranks, must_launch, process_group, shared_run
from eagle3.provenance import start_run
from eagle3.report import read_summary


def train(config: Config, job: Job) -> float:
    """Run one job, on this process or on ranks of its own.

    Returns:
        The best ``val/acceptance_replay``, which sweepers maximise.
    """
    check(config)
    if must_launch(config):
        run = start_run(config, job)
        code = launch_ranks(run.directory, config.trainer.devices)
        if code:
            raise JobFailed(code)
        return float(read_summary(run.directory)["best/acceptance_replay"])
    with process_group(config) as ranks:
        from eagle3.fit import (
            fit,
        )  # seconds of imports that a mistake in the command need not wait for

        return fit(config, shared_run(config, job, ranks))


if __name__ == "__main__":
    sys.exit(entry_point(train))
