"""Running the jobs of a pool as child processes, first fit, until all have ended.

Each job is the command of this process with :data:`eagle3.pool.job.OPTION` instead of its
arguments, so that it composes nothing, sweeps nothing, and starts its own ranks if it needs some.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eagle3.config import RESUME_AUTO
from eagle3.errors import ConfigError, TrainingError
from eagle3.launch import STOP_GRACE_S, Processes, forwarded_signals, kill_left
from eagle3.pool.devices import Devices, FreeDevices
from eagle3.pool.job import OPTION, PoolJob
from eagle3.run_folder import append_failed_job, read_failed_jobs
from eagle3.slurm import SLURM_JOB, requeue

_POLL_S = 0.1
_MARGIN_S = 30.0
"""What a job gets after its ranks' own time to stop has run out."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    job: PoolJob
    code: int
    """Exit code; 128 + number if a signal ended it."""
    value: float | None = None


@dataclass(frozen=True)
class _Running:
    job: PoolJob
    process: subprocess.Popen[bytes]
    devices: Devices
    since: float
    """Of the monotonic clock."""
    began: float
    """Of the wall clock, as records of failures."""


def run_jobs(jobs: Sequence[PoolJob], devices: Devices, say: Say = print) -> list[Outcome]:
    """Run ``jobs`` side by side, each on ``trainer.devices`` of ``devices``; in their order.

    The first waiting job that fits starts as soon as devices come free. A job that fails ends no
    other one; it is kept in ``failed_jobs.jsonl``.

    Raises:
        ConfigError: a job needs more devices than the pool holds; then none was started.
        SystemExit: with EX_TEMPFAIL (75), when SIGTERM, SIGINT or SIGUSR1 came. Running jobs were
            sent it and waited for, waiting ones were not started; with ``resume=auto`` Slurm was
            asked to start the whole sweep again.
    """
    for job in jobs:
        if job.devices > len(devices.names):
            raise ConfigError(
                f"job #{job.number} needs trainer.devices={job.devices}, but the pool holds "
                f"{devices}: give it fewer, or the pool more. No job was started"
            )
    return _Pool(jobs, devices, say).run()


class _Pool:
    def __init__(self, jobs: Sequence[PoolJob], devices: Devices, say: Say) -> None:
        self._jobs = jobs
        self._waiting = list(jobs)
        self._devices = devices
        self._free = FreeDevices(devices)
        self._running: list[_Running] = []
        self._processes: Processes = []
        self._outcomes: dict[int, Outcome] = {}
        self._seconds: list[float] = []
        self._say = say

    def run(self) -> list[Outcome]:
        self._say(f"pool: {len(self._jobs)} job(s) on {self._devices}; {self._jobs[0].log.parent}")
        deadline = float("inf")
        try:
            with forwarded_signals(self._processes) as received:
                while self._running or (self._waiting and not received):
                    if not received:
                        self._start_what_fits(received)
                    elif deadline == float("inf"):
                        deadline = time.monotonic() + STOP_GRACE_S + _MARGIN_S
                        self._say(f"pool: stopping {len(self._running)} job(s), which save first")
                    if time.monotonic() > deadline:
                        break
                    time.sleep(_POLL_S)
                    self._collect(stopping=bool(received))
        finally:
            kill_left(self._processes)
        if received:
            self._say(
                f"pool: stopped by {signal.Signals(received[0]).name} with "
                f"{len(self._jobs) - len(self._seconds)} job(s) not at their end, "
                f"{len(self._waiting)} of them not begun: start the same command with resume=auto"
            )
            if all(job.config.get("resume") == RESUME_AUTO for job in self._jobs):
                requeue(os.environ)
            raise SystemExit(os.EX_TEMPFAIL)
        return [self._outcomes[job.number] for job in self._jobs]

    def _start_what_fits(self, received: Sequence[int]) -> None:
        for job in list(self._waiting):
            devices = self._free.take(job.devices)
            if devices is None:
                continue
            self._waiting.remove(job)
            began = time.time()
            # a job that asks Slurm to start it again would cut the others short while they save
            given = {name: value for name, value in os.environ.items() if name != SLURM_JOB}
            process = _start(job, devices.environment(self._devices, given))
            self._processes.append(process)
            self._running.append(_Running(job, process, devices, time.monotonic(), began))
            self._say(f"{_label(job)} started on {devices}")
            if received:  # a signal between the two lines above was not passed on to it
                process.send_signal(received[-1])
                return

    def _collect(self, stopping: bool) -> None:
        for running in list(self._running):
            returncode = running.process.poll()
            if returncode is None:
                continue
            self._running.remove(running)
            self._free.give(running.devices)
            code = returncode if returncode >= 0 else 128 - returncode
            job, seconds = running.job, time.monotonic() - running.since
            if stopping and code:
                continue
            self._outcomes[job.number] = Outcome(job, code, job.value)
            self._seconds.append(seconds)
            how = f"finished{_best(job.value)}" if not code else f"failed: {_reason(running, code)}"
            self._say(f"{_label(job)} {how} after {_duration(seconds)}{self._progress()}")

    def _progress(self) -> str:
        done, total = len(self._outcomes), len(self._jobs)
        elapsed = [time.monotonic() - running.since for running in self._running]
        left = remaining_s(self._seconds, elapsed, len(self._waiting))
        eta = f", about {_duration(left)} left" if done < total else ""
        return f" ({done} of {total} done{eta})"


def remaining_s(done: Sequence[float], elapsed: Sequence[float], waiting: int) -> float:
    """Seconds until all jobs have ended, if each takes what those that ended took on average.

    Args:
        done: seconds of each job that has ended, at least one.
        elapsed: seconds since each running job began.
        waiting: jobs that have not begun; as many run at once as do now.
    """
    mean = sum(done) / len(done)
    started = [max(0.0, mean - seconds) for seconds in elapsed]
    lanes = max(1, len(started))
    return max(max(started, default=0.0), (sum(started) + waiting * mean) / lanes)


def _start(job: PoolJob, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    own = len(sys.orig_argv) - len(sys.argv) + 1  # interpreter, its options, module or file
    command = [sys.executable, *sys.orig_argv[1:own], OPTION, str(job.write())]
    with job.log.open("wb") as log:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,  # closes when this process is gone, which ends the job
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,  # signals of the terminal reach the job through us, once
        )


def _reason(running: _Running, code: int) -> str:
    """Why a job failed, from its own record; one is made for a job that left none."""
    job = running.job
    if code == os.EX_TEMPFAIL:
        error = TrainingError("a signal to this job stopped it, all is saved; go on: resume=auto")
        _record(job, error, code)
    records = [
        record
        for record in read_failed_jobs(job.sweep_dir)
        if record["number"] == job.number and record["time"] >= running.began
    ]
    if not records:
        how = f"signal {code - 128}" if code > 128 else f"exit code {code}"
        _record(job, TrainingError(f"its process ended by {how} and left no message"), code)
        return _reason(running, code)
    return f"{_short(records[-1]['message'])} (exit code {code}; {job.log})"


def _record(job: PoolJob, error: Exception, code: int) -> None:
    append_failed_job(
        job.sweep_dir,
        number=job.number,
        error=error,
        overrides=job.overrides,
        config=job.config,
        code=code,
    )


def _label(job: PoolJob) -> str:
    """Number and overrides, without those that the command line gives to every job."""
    own = [override for override in job.overrides if override not in sys.argv]
    return " ".join([f"#{job.number}", *own])


def _best(value: float | None) -> str:
    return "" if value is None else f" with best={value:.3f}"


def _short(text: str, limit: int = 160) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
