"""Which run folder a command trains in: a new one, or that of a run which did not finish."""

from __future__ import annotations

import contextlib
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle3.compose import Job, load_config
from eagle3.config import RESUME_AUTO, Config
from eagle3.errors import ConfigError, UserError
from eagle3.locking import exclusive
from eagle3.provenance import Run, continue_run, job_fingerprint, start_run
from eagle3.run_folder import (
    COMPLETE,
    CONFIG_FILE,
    PROVENANCE_FILE,
    SUMMARY_FILE,
    best_value,
    checkpoints,
    note_elsewhere,
    read_json,
)

_LOCK_FILE = ".lock"


@dataclass(frozen=True)
class Saved:
    """What a checkpoint says about the run it was taken in."""

    path: Path
    step: int
    """Optimizer steps done."""
    rows: int
    """Rows of ``metrics.csv`` written by then."""

    @classmethod
    def read(cls, path: Path) -> Saved:
        """Read the head of ``path``, whatever the size of its weights.

        Raises:
            ConfigError: it is no checkpoint of a run, or only a part of one.
        """
        try:
            content: dict[str, Any] = torch.load(
                path, map_location="cpu", mmap=True, weights_only=True
            )
            state = content["callbacks"]["CheckpointPolicy"]
            return cls(path, content["global_step"], state["rows"])
        except Exception as error:  # a cut or overwritten file fails in ever other ways
            raise _not_whole(path, error) from error


def begin(config: Config, job: Job) -> Run:
    """The run that ``config`` asks for, its folder made or found.

    ``resume=auto`` goes on in the folder of the newest run of the same job that did not finish,
    wherever below ``paths.output`` it lies. ``resume=PATH`` does so in the folder that the
    checkpoint lies in, if that is one of the same job; else it begins a new folder from there.

    Raises:
        ConfigError: ``resume=PATH`` is damaged, or ``paths.output`` cannot be written.
    """
    if config.resume is None:
        return start_run(config, job)
    if config.resume != RESUME_AUTO:
        checkpoint = Path(config.resume).resolve()
        _refuse_damaged(checkpoint)
        if _is_same_job(checkpoint.parent.parent, job_fingerprint(config)):
            return continue_run(config, checkpoint.parent.parent, checkpoint)
        return start_run(config, job, checkpoint)
    output = Path(config.paths.output).resolve()
    for directory in _unfinished(output, job_fingerprint(config)):
        newest = _newest_whole(directory)
        if newest is not None:
            print(f"resume=auto: {directory} goes on after step {newest.step} ({newest.path.name})")
            note_elsewhere(job.sweep_dir, directory)
            return continue_run(config, directory, newest.path)
    print(f"resume=auto: found no run of this job in {output} to go on with, so it begins anew")
    return start_run(config, job)


def finished(config: Config, job: Job) -> float | None:
    """What a sweep with ``resume=auto`` need not train again, as an earlier sweep has.

    That is a run of the same job, with the same paths of data and verifier, that was not cut short.

    Returns:
        Its best ``val/acceptance_replay``; null: there is none, or this is no such sweep.
    """
    if config.resume != RESUME_AUTO or job.sweep_dir is None:
        return None
    for directory in _runs_of(Path(config.paths.output).resolve(), job_fingerprint(config)):
        if _is_complete(directory) and _same_inputs(directory, config):
            value = best_value(directory)
            print(f"resume=auto: {directory} has finished with {value:.3f}, so it is not trained")
            note_elsewhere(job.sweep_dir, directory)
            return value
    return None


def _same_inputs(directory: Path, config: Config) -> bool:
    """The fingerprint of a job leaves paths out, and without training nothing looks at the data."""
    before = load_config(directory / CONFIG_FILE)
    return _inputs(before) == _inputs(config)


def _inputs(config: Config) -> list[Path | None]:
    paths = config.paths
    given = [paths.verifier, paths.shards, paths.val_shards, paths.vocab_map, paths.arrow]
    given += [part.path for part in config.data.mixture]
    return [None if path is None else Path(path).resolve() for path in given]


@contextlib.contextmanager
def only_process_in(run: Run) -> Iterator[None]:
    """Hold the run folder, so that nobody else trains in it; on file systems with locks."""
    with contextlib.ExitStack() as held:
        if run.is_main:
            with contextlib.suppress(UserError):
                held.enter_context(exclusive(run.directory / _LOCK_FILE, print))
        yield


def _unfinished(output: Path, fingerprint: str) -> Iterator[Path]:
    """Run folders of the job that did not finish, newest first, once no process is in them."""
    for directory in _runs_of(output, fingerprint):
        if _is_complete(directory):
            continue
        with only_process_in(Run(directory, "", "", "")):
            ended = _is_complete(directory)
        if not ended:
            yield directory


def _runs_of(output: Path, fingerprint: str) -> list[Path]:
    """Run folders of the job below ``output``, newest first."""
    records = [*output.glob(f"*/{PROVENANCE_FILE}"), *output.glob(f"*/*/{PROVENANCE_FILE}")]
    found = [path.parent for path in records if _is_same_job(path.parent, fingerprint)]
    return sorted(found, key=_started, reverse=True)


def _is_same_job(directory: Path, fingerprint: str) -> bool:
    if not (directory / PROVENANCE_FILE).is_file():
        return False
    return read_json(directory, PROVENANCE_FILE).get("job") == fingerprint


def _is_complete(directory: Path) -> bool:
    if not (directory / SUMMARY_FILE).is_file():
        return False
    return read_json(directory, SUMMARY_FILE)["exit_reason"] in COMPLETE


def _started(directory: Path) -> tuple[str, int]:
    """When the latest process in it began; to the second, then by the clock of the disk."""
    record = read_json(directory, PROVENANCE_FILE)
    latest = [record, *record.get("continued", [])][-1]
    return latest["started"], (directory / PROVENANCE_FILE).stat().st_mtime_ns


def _newest_whole(directory: Path) -> Saved | None:
    """The newest checkpoint that can be read to its end; warns of each that cannot."""
    found = []
    for path in checkpoints(directory).glob("*.ckpt"):
        try:
            found.append(Saved.read(path))
        except ConfigError as error:
            _warn(error)
    # of two at the same step rather that which is not the best: it was written last
    for saved in sorted(found, key=lambda s: (s.step, s.path.name), reverse=True):
        try:
            _refuse_damaged(saved.path)
        except ConfigError as error:
            _warn(error)
        else:
            return saved
    return None


def _refuse_damaged(path: Path) -> None:
    """Read ``path`` to its end and compare the checksums in it.

    Raises:
        ConfigError: it is not as it was written.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (OSError, zipfile.BadZipFile) as error:
        raise _not_whole(path, error) from error
    if damaged is not None:
        raise _not_whole(path, ValueError(f"the checksum of {damaged} is wrong"))


def _warn(error: ConfigError) -> None:
    print(f"warning: passed over {error}", file=sys.stderr, flush=True)


def _not_whole(path: Path, error: Exception) -> ConfigError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return ConfigError(
        f"{path}: found no whole checkpoint ({reason}); give another one, or resume=auto"
    )
