"""Asking Slurm to start this job once more."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

SLURM_JOB = "SLURM_JOB_ID"
_TIMEOUT_S = 60.0


def requeue(environment: Mapping[str, str]) -> None:
    """``scontrol requeue`` for the job that this process runs in; outside Slurm nothing.

    Slurm decides whether a job may be requeued (``sbatch --requeue``); a refusal is printed.
    """
    job = environment.get(SLURM_JOB)
    if job is None:
        return
    if "SLURM_ARRAY_JOB_ID" in environment and "SLURM_ARRAY_TASK_ID" in environment:
        job = f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    try:
        done = subprocess.run(
            ["scontrol", "requeue", job],
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
        refusal = done.stderr.strip() if done.returncode else None
    except (OSError, subprocess.TimeoutExpired) as error:
        refusal = str(error)
    if refusal is None:
        print(f"Slurm starts job {job} again", flush=True)
    else:
        print(f"Slurm does not start job {job} again ({refusal}): submit it once more", flush=True)
