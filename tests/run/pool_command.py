"""An entry point whose jobs do what ``name`` says, and leave in ``paths.output`` that they did."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from eagle3.compose import Job, entry_point
from eagle3.config import Config
from eagle3.errors import ConfigError
from eagle3.terminal import JobFailedError


def act(config: Config, job: Job) -> float:
    """Roles: plain, meet (waits for the next job), fails, crashes, killed, waits (for a signal)."""
    folder = Path(config.paths.output)
    role = config.name.split("_")[job.number] if "_" in config.name else config.name
    note = {
        "pid": os.getpid(),
        "cards": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "slurm": os.environ.get("SLURM_JOB_ID"),
        "devices": config.trainer.devices,
        "overrides": job.overrides,
        "began": time.monotonic(),
    }

    def keep(name: str) -> None:
        done = note | {"ended": time.monotonic()}
        part = folder / f".{name}_{job.number}"
        part.write_text(json.dumps(done))
        part.rename(folder / f"{name}_{job.number}")  # seen whole or not at all

    def on_signal(signum: int, frame: FrameType | None) -> None:
        keep("saved")
        raise SystemExit(os.EX_TEMPFAIL)

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGUSR1, on_signal)
    print(f"job {job.number} speaks")
    keep("started")
    while role == "waits" or (
        role == "meet" and not (folder / f"started_{job.number ^ 1}").exists()
    ):
        time.sleep(0.02)
    if role == "fails":
        raise JobFailedError(7)
    if role == "refused":
        raise ConfigError("this will not do")
    if role == "crashes":
        raise OSError("the disk went away")
    if role == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1)
    keep("ended")
    return 1.0 - abs(config.lr - 0.02)


def after_sweep(folder: Path) -> None:
    print(f"swept {folder}")


if __name__ == "__main__":
    sys.exit(entry_point(act, after_sweep))
