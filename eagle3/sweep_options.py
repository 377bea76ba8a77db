"""``hydra/launcher=submitit_slurm`` and ``hydra/sweeper=optuna`` with defaults for these jobs.

They stand in the place of the plugins' own options. A YAML file could not: Hydra merges a file onto
a plugin's option of the same name, and refuses that where the option has a defaults list.
"""

from __future__ import annotations

from typing import Any

SUBMITIT_SLURM: dict[str, Any] = {
    "_target_": "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher",
    "submitit_folder": "${hydra.sweep.dir}/.submitit/%j",
    "name": "${hydra.job.name}",
    "timeout_min": 1440,
    "nodes": 1,
    "tasks_per_node": 1,  # a job starts its ranks itself
    "gpus_per_node": "${trainer.devices}",
    "cpus_per_task": None,
    "mem_gb": None,
    "partition": None,
    "account": None,
    "qos": None,
    "constraint": None,
    "exclude": None,
    "comment": None,
    "gres": None,
    "setup": None,
    "array_parallelism": 256,
    "stderr_to_stdout": True,
    # submitit's own way to start a job again stays off: the job asks Slurm, with resume=auto
    "max_num_timeout": 0,
    "additional_parameters": {
        "signal": "USR1@300",  # seconds before the limit, for a step and a checkpoint
        "requeue": True,  # allows it
    },
}
"""One Slurm array for a sweep, an element a job."""

OPTUNA: dict[str, Any] = {
    "defaults": [{"sampler": "tpe"}, "_self_"],
    "_target_": "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper",
    "direction": "maximize",  # what a training job returns: best/acceptance_replay
    "n_trials": 20,
    "n_jobs": 1,  # more with hydra/launcher=gpu_pool: as many as run side by side
    "max_failure_rate": 1.0,  # a job that fails does not end the others
    # the same proposals again, so that resume=auto knows the jobs that finished
    "sampler": {"seed": 0},
    "storage": None,
    "study_name": None,
    "search_space": None,
    "custom_search_space": None,
    "params": None,
}
"""A search instead of a grid: ``n_trials`` jobs, ``n_jobs`` proposed at once."""

OPTIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("hydra/launcher", "submitit_slurm"): SUBMITIT_SLURM,
    ("hydra/sweeper", "optuna"): OPTUNA,
}
