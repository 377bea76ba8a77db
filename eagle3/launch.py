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
from pathlib import Path
from types import FrameType

GRACE_S = 30.0
"""Time the remaining ranks get to end by themselves."""
_FORWARDED = (signal.SIGTERM, signal.SIGINT)

Processes = list[subprocess.Popen[bytes]]


def launch_ranks(run_dir: Path, world_size: int, grace_s: float = GRACE_S) -> int:
    """Start ``world_size`` ranks on the run in ``run_dir`` and wait for all of them.

    SIGTERM and SIGINT are passed on to the ranks, and raised again here once they have ended. When
    a rank fails or a signal came, the others get ``grace_s`` seconds and are then killed; no
    process is left behind.

    Returns:
        0, or the exit code of the rank that failed first (128 + number if a signal ended it).
    """
    processes: Processes = []
    try:
        with _forwarded_signals(processes) as received:
            processes += [_start(run_dir, env) for env in _environments(world_size)]
            code = _wait(processes, received, grace_s)
    finally:
        _kill(processes)
    if received:
        signal.raise_signal(received[0])  # end, or unwind, as any process does on this signal
    return code


@contextmanager
def _forwarded_signals(processes: Processes) -> Iterator[list[int]]:
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


def _wait(processes: Processes, received: list[int], grace_s: float) -> int:
    """Exit code of the rank that failed first; after it, or a signal, the others are ended."""
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    for process in processes:
        # one waiting thread each, so that codes arrive in the order in which ranks end
        threading.Thread(target=lambda p=process: ended.put(p.wait()), daemon=True).start()
    running, code, deadline = len(processes), 0, float("inf")
    while running and time.monotonic() < deadline:
        try:
            returncode = ended.get(timeout=0.5)
        except queue.Empty:
            returncode = 0
        else:
            running -= 1
        if returncode and not code:
            code = returncode if returncode > 0 else 128 - returncode
        if deadline == float("inf") and (code or received):
            deadline = time.monotonic() + grace_s
            if not received:
                _signal_all(processes, signal.SIGTERM)
    return code


def _signal_all(processes: Processes, signum: int) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(signum)


def _kill(processes: Processes) -> None:
    """Kill what is still there, each rank with the processes of its group."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def end_with_launcher(grace_s: float = GRACE_S) -> None:
    """In a rank: end when the process that launched it is gone, however that came about."""

    def watch() -> None:
        os.read(0, 1)  # returns when the launcher's end of the pipe is closed
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
        os._exit(1)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()
