"""``hydra/launcher=gpu_pool``: the jobs of a sweep side by side on disjoint cards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hydra.core.utils import JobReturn, JobStatus, configure_log, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, ListConfig, OmegaConf

if TYPE_CHECKING:
    from eagle3.pool.job import PoolJob


class GpuPoolLauncher(Launcher):
    """Composes every job, then hands all of them to :func:`eagle3.pool.running.run_jobs`.

    Args:
        cards: of the pool, as CUDA names them; null: those that are visible.
        slots: processes at once, for jobs on the CPU; null: a pool of cards.
    """

    def __init__(self, cards: ListConfig | None = None, slots: int | None = None) -> None:
        self._cards = cards
        self._slots = slots

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """What Hydra gives to every launcher; the task function is found again by each job."""
        self._loader = hydra_context.config_loader
        self._config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run one job for each of ``job_overrides``; what they returned or failed with.

        Raises:
            ConfigError, SystemExit: see :func:`eagle3.pool.running.run_jobs`.
        """
        # Hydra imports every plugin at each start, also where no pool is wanted
        from eagle3.pool.devices import find_devices
        from eagle3.pool.running import run_jobs
        from eagle3.terminal import JobFailedError

        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        devices = find_devices(self._cards, self._slots)
        jobs = [
            self._job(number, overrides)
            for number, overrides in enumerate(job_overrides, start=initial_job_idx)
        ]
        returns = []
        for outcome in run_jobs(jobs, devices):
            returned = JobReturn(overrides=list(outcome.job.overrides))
            returned.status = JobStatus.FAILED if outcome.code else JobStatus.COMPLETED
            returned.return_value = JobFailedError(outcome.code) if outcome.code else outcome.value
            returns.append(returned)
        return returns

    def _job(self, number: int, overrides: Sequence[str]) -> PoolJob:
        from eagle3.pool.job import PoolJob

        composed = self._loader.load_sweep_config(self._config, list(overrides))
        hydra = composed.hydra
        tree = OmegaConf.masked_copy(composed, [key for key in composed if key != "hydra"])
        plain = OmegaConf.to_container(tree, resolve=True)
        return PoolJob(
            number=number,
            sweep_dir=Path(hydra.sweep.dir).resolve(),
            experiment=hydra.runtime.choices.get("experiment"),
            overrides=tuple(hydra.overrides.task),
            config=cast(dict[str, Any], plain),
        )
