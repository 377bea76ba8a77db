"""Starting the ranks of a run as processes of this machine, and ending them together.

Each rank is ``python -m eagle3.worker RUN_FOLDER``: it reads the resolved configuration, so it
never sees the command line, and a ``--multirun`` is not run once more per rank.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

GRACE_S = 30.0
"""Time the remaining ranks get to end by themselves when one has failed."""
STOP_GRACE_S = 300.0
"""Time all ranks get to finish a step, save and report, after a signal."""
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_CAUSES: dict[int, str] = {
    signal.SIGKILL: "mostly the kernel, because memory ran out (`dmesg` says so), or a scheduler",
    signal.SIGBUS: "a shared memory or a disk that is full, or a file that was cut",
    signal.SIGTERM: "a scheduler, or somebody by hand",
}

Processes = list[subprocess.Popen[bytes]]


def launch_ranks(run_dir: Path, world_size: int, grace_s: float = GRACE_S) -> int:
    """Start ``world_size`` ranks on the run in ``run_dir`` and wait for all of them.

    SIGTERM, SIGINT and SIGUSR1 are passed on to the ranks, which save and end with EX_TEMPFAIL
    (75); where they ended otherwise, the signal is raised again here. When a rank fails or a second
    SIGINT comes, the others get ``grace_s`` seconds and are then killed; no process is left behind.

    Returns:
        0, or the exit code of the rank that failed first (128 + number if a signal ended it, which
        is then said on standard error).
    """
    processes: Processes = []
    try:
        with forwarded_signals(processes) as received:
            processes += [_start(run_dir, env) for env in _environments(world_size)]
            failed, code = _wait(processes, received, grace_s)
    finally:
        kill_left(processes)
    if received and code != os.EX_TEMPFAIL:
        signal.raise_signal(received[0])  # end, or unwind, as any process does on this signal
    if code < 0:  # a rank that ends by itself has said why, this one could not
        print(killed_message(run_dir, failed, -code), file=sys.stderr, flush=True)
    return code if code >= 0 else 128 - code


@contextmanager
def forwarded_signals(processes: Processes) -> Iterator[list[int]]:
    """Pass signals on to ``processes``; yields the list of those that came."""
    received: list[int] = []

    def forward(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        _signal_all(processes, signum)

    # a signal that is ignored (nohup, background jobs) stays ignored; SIGHUP is never touched
    watched = [s for s in _FORWARDED if signal.getsignal(s) is not signal.SIG_IGN]
    previous = {signum: signal.signal(signum, forward) for signum in watched}
    try:
        yield received
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _environments(world_size: int) -> list[dict[str, str]]:
    """What torchrun would set, one environment per rank."""
    threads = max(1, (os.cpu_count() or 1) // world_size)
    shared = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }
    return [
        {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        for rank in range(world_size)
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _start(run_dir: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "eagle3.worker", str(run_dir)],
        env=environment,
        stdin=subprocess.PIPE,  # closes when this process is gone, which ends the rank
        process_group=0,  # signals of the terminal reach the ranks through us, once
    )


def _wait(processes: Processes, received: list[int], grace_s: float) -> tuple[int, int]:
    """The rank that failed first and its return code, negative for a signal; code 0: none failed.

    After a failure, or a signal to this process, the others are ended; not when the first that
    ended has saved after a signal, as then all do.
    """
    ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    for rank, process in enumerate(processes):
        # one waiting thread each, so that codes arrive in the order in which ranks end
        wait = partial(_put_end, ended, rank, process)
        threading.Thread(target=wait, daemon=True).start()
    running, failed, code, deadline, hurried = len(processes), 0, 0, float("inf"), False
    while running and time.monotonic() < deadline:
        try:
            rank, returncode = ended.get(timeout=0.5)
        except queue.Empty:
            returncode = 0
        else:
            running -= 1
        if returncode and not code:
            failed, code = rank, returncode
        hurry = code not in (0, os.EX_TEMPFAIL) or received.count(signal.SIGINT) > 1
        if hurry and not hurried:
            hurried, deadline = True, time.monotonic() + grace_s
            if not received:
                _signal_all(processes, signal.SIGTERM)
        elif (code or received) and deadline == float("inf"):
            deadline = time.monotonic() + STOP_GRACE_S
    return failed, code


def _put_end(
    ended: queue.SimpleQueue[tuple[int, int]], rank: int, process: subprocess.Popen[bytes]
) -> None:
    ended.put((rank, process.wait()))


def killed_message(run_dir: Path, rank: int, number: int) -> str:
    """What to say about a rank that a signal ended: who, by what, and how to go on."""
    try:
        name = signal.Signals(number).name
    except ValueError:  # a real-time signal
        name = "no name"
    cause = _CAUSES.get(number, "a crash in native code, or somebody by hand")
    checkpoints = (run_dir / "checkpoints").glob("*.ckpt")
    latest = max(checkpoints, key=lambda path: path.stat().st_mtime, default=None)
    again = "start the run again" if latest is None else f"go on with resume={latest}"
    return (
        f"error: rank {rank} was ended by signal {number} ({name}), and with it the run. What "
        f"sends it: {cause}. Mend that, then {again}"
    )


def _signal_all(processes: Processes, signum: int) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(signum)


def kill_left(processes: Processes) -> None:
    """Kill what is still there, each rank with the processes of its group."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def end_with_launcher(grace_s: float = STOP_GRACE_S) -> None:
    """In a rank: end when the process that launched it is gone, however that came about."""

    def watch() -> None:
        os.read(0, 1)  # returns when the launcher's end of the pipe is closed
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
        os._exit(1)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()
