"""The run folder: made once per job, holding what is needed to tell later what ran.

``config.yaml`` is the resolved configuration, ``provenance.json`` the command line, versions,
machine and git state; metrics, checkpoints and the report are added by the run itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import secrets
import shlex
import socket
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from eagle3.compose import Job, save_config
from eagle3.config import Config
from eagle3.errors import ConfigError
from eagle3.run_folder import CONFIG_FILE, PROVENANCE_FILE, read_json, write_json


@dataclass(frozen=True)
class Run:
    """One training run, the same on all of its ranks but for ``is_main``."""

    directory: Path
    name: str
    id: str
    """Unique over machines and sweeps; the W&B run id."""
    group: str
    """Sweep or experiment that runs are compared within."""
    is_main: bool = True
    """Whether this process is global rank 0: it alone writes files and logs."""
    checkpoint: Path | None = None
    """What training goes on from; null: it begins anew."""

    @property
    def continues(self) -> bool:
        """Whether an earlier process has trained and logged in this folder."""
        return self.checkpoint is not None and self.directory in self.checkpoint.parents


def start_run(config: Config, job: Job, checkpoint: Path | None = None) -> Run:
    """Make the run folder, in the sweep's folder if there is one, and record what runs.

    Args:
        checkpoint: of another run, to go on from.

    Raises:
        ConfigError: ``paths.output`` cannot be written.
    """
    parent = job.sweep_dir or Path(config.paths.output).resolve()
    identity = secrets.token_hex(5)
    name = run_name(config, identity[:4])
    directory = parent / name
    try:
        directory.mkdir(parents=True)
    except FileExistsError:  # another run drew the same four digits
        return start_run(config, job, checkpoint)
    except OSError as error:
        raise ConfigError(
            f"cannot make the run folder {directory} ({error.strerror}): "
            "give paths.output=/a/writable/directory"
        ) from error
    group = config.logger.group or (parent.name if job.sweep_dir else job.experiment or config.name)
    save_config(config, directory / CONFIG_FILE)
    record = {
        "name": name,
        "id": identity,
        "group": group,
        "job": job_fingerprint(config),
        "checkpoint": None if checkpoint is None else str(checkpoint),
        **provenance(),
    }
    write_json(directory, PROVENANCE_FILE, record)
    return load_run(directory, is_main=True)


def continue_run(config: Config, directory: Path, checkpoint: Path) -> Run:
    """Go on in the run folder ``directory`` from one of its checkpoints, and record that."""
    record = read_json(directory, PROVENANCE_FILE)
    # the same settings, but paths may be others now, and ranks read them here
    save_config(config, directory / CONFIG_FILE)
    attempts = [*record.get("continued", []), {"from": checkpoint.name, **provenance()}]
    record |= {"checkpoint": str(checkpoint), "continued": attempts}
    write_json(directory, PROVENANCE_FILE, record)
    return load_run(directory, is_main=True)


def load_run(directory: Path, *, is_main: bool) -> Run:
    """The run of an existing run folder, as another rank of it sees it."""
    record = read_json(directory, PROVENANCE_FILE)
    checkpoint = record.get("checkpoint")
    return Run(
        directory,
        record["name"],
        record["id"],
        record["group"],
        is_main,
        None if checkpoint is None else Path(checkpoint),
    )


def job_fingerprint(config: Config) -> str:
    """Hash of what is trained and how; the same wherever data lie and whatever is logged."""
    settings = dataclasses.asdict(config)
    for left_out in ("paths", "logger", "health", "resume", "preflight", "preflight_json", "card"):
        del settings[left_out]
    del settings["trainer"]["start"]
    if config.paths.init is not None:  # two starts make two jobs; nothing else tells them apart
        settings["init"] = str(Path(config.paths.init).resolve())
    for part in settings["data"]["mixture"]:
        del part["path"]
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def run_name(config: Config, suffix: str) -> str:
    """Name with the knobs in it, such as ``kimi_100k_lr3e-5_L4096_S3_n0.05_e5_s0_ab12``."""
    return (
        f"{config.name}_lr{_short(config.lr)}_L{config.max_seq_len}_S{config.ttt_steps}"
        f"_n{config.noise_std:g}_e{config.epochs}_s{config.seed}_{suffix}"
    )


def _short(rate: float) -> str:
    """Scientific notation to three digits without padding: 3e-5, 2.5e-4."""
    mantissa, exponent = f"{rate:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def provenance() -> dict[str, Any]:
    """Command line, versions, machine and git state of this process, as plain values."""
    revision, dirty = git_state(Path(__file__).resolve().parent)
    packages = {dist.name: dist.version for dist in importlib.metadata.distributions()}
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.orig_argv),
        "working_directory": str(Path.cwd()),
        "git": {"revision": revision, "dirty": dirty},
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpu_count": os.cpu_count(),
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
    }


def git_state(package: Path) -> tuple[str | None, bool | None]:
    """Revision and dirty flag of the checkout that ``package`` is tracked in.

    Both are null for an installed package, also when its environment lies inside some other
    checkout. Dirty means: package or ``conf`` differ from the revision, new files included.
    """
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None, None
    revision = _git(package, "rev-parse", "HEAD")
    changes = _git(package, "status", "--porcelain", "--", ".", "../conf")
    return (revision or "").strip() or None, None if changes is None else bool(changes.strip())


def _git(directory: Path, *arguments: str) -> str | None:
    """Output of a git command; null when it fails or there is no git."""
    # a hook or an outer git command may point these at another repository
    environment = {k: v for k, v in os.environ.items() if not re.match(r"GIT_(DIR|WORK|INDEX)", k)}
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
