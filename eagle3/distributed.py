"""Ranks: who starts them, how they meet, and what happens when one of them ends.

Several devices mean several processes. ``python -m eagle3.train trainer.devices=4`` starts them itself,
each as ``python -m eagle3.worker RUN_FOLDER``, so none of them parses the command line again (a
``--multirun`` is not run once more per rank) and all share one run folder. Under ``torchrun`` the
processes are there already, and the same run begins with them.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from eagle3.checks import device_count
from eagle3.compose import Job
from eagle3.config import Config, TrainerConfig
from eagle3.errors import ConfigError
from eagle3.names import Accelerator
from eagle3.provenance import Run, start_run

_GRACE_S = 30.0
"""Time the remaining ranks get to end by themselves."""
_POLL_S = 0.1
_FORWARDED = (signal.SIGTERM, signal.SIGINT)
_REMEDIES = """\
Usual causes and remedies:
  - cards without peer access (PCIe-only Blackwell and others): export NCCL_P2P_DISABLE=1
  - gloo picked a wrong network interface: export GLOO_SOCKET_IFNAME=eth0 (NCCL_SOCKET_IFNAME for NCCL)
  - a rank did not start, or died before this point: read the messages of the other ranks
  - a slow machine: trainer.all_reduce_timeout_s=300"""


@dataclass(frozen=True)
class Ranks:
    """Place of this process among the ranks, as torchrun and :func:`launch_ranks` state it."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.local_world_size


def ranks_from_environment() -> Ranks | None:
    """The place of this process; null when it was not started as one of several ranks."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    world_size = int(os.environ["WORLD_SIZE"])
    return Ranks(
        rank=int(os.environ["RANK"]),
        local_rank=int(os.environ.get("LOCAL_RANK", os.environ["RANK"])),
        world_size=world_size,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
    )


def must_launch(config: Config) -> bool:
    """Whether this process has to start the ranks, instead of being one of them."""
    return ranks_from_environment() is None and device_count(config.trainer.devices) > 1


def resolve_accelerator(trainer: TrainerConfig) -> str:
    """``gpu`` or ``cpu``, after checking that the cards asked for are there.

    Raises:
        ConfigError: a card is asked for that this machine lacks.
    """
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if trainer.accelerator == Accelerator.cpu:
        return "cpu"
    if trainer.accelerator == Accelerator.auto and not present:
        return "cpu"
    devices = trainer.devices
    highest = max(devices) if isinstance(devices, list) else device_count(devices) - 1
    if highest >= present:
        raise ConfigError(
            f"trainer.devices={devices} with trainer.accelerator={trainer.accelerator.value}: this "
            f"machine has {present} card(s) that torch can use. Give trainer.devices within them, "
            "or trainer.accelerator=cpu"
        )
    return "gpu"


def placement(config: Config) -> dict[str, Any]:
    """Arguments of ``lightning.Trainer`` that say where this process trains."""
    accelerator = resolve_accelerator(config.trainer)
    ranks = ranks_from_environment() or Ranks()
    devices = config.trainer.devices
    if accelerator == "cpu":
        devices = device_count(devices)
    return {
        "accelerator": accelerator,
        "devices": devices,
        "num_nodes": ranks.num_nodes,
        "strategy": "ddp" if ranks.world_size > 1 else "auto",
        "use_distributed_sampler": False,  # the plan of the data module knows its rank
    }


@contextmanager
def process_group(config: Config) -> Iterator[Ranks]:
    """Join the other ranks, if there are any, and leave them in the end.

    Raises:
        ConfigError: the number of processes is not what ``trainer.devices`` asks for.
    """
    ranks = ranks_from_environment() or Ranks()
    wanted = device_count(config.trainer.devices)
    if ranks.local_world_size != wanted:
        raise ConfigError(
            f"{ranks.local_world_size} process(es) were started here (WORLD_SIZE="
            f"{ranks.world_size}), but trainer.devices={config.trainer.devices} asks for {wanted}: "
            f"give --nproc_per_node={wanted}, or trainer.devices={ranks.local_world_size}"
        )
    if ranks.world_size == 1:
        yield ranks
        return
    accelerator = resolve_accelerator(config.trainer)
    if accelerator == "gpu":
        devices = config.trainer.devices
        torch.cuda.set_device(
            devices[ranks.local_rank] if isinstance(devices, list) else ranks.local_rank
        )
    init_process_group(accelerator, config.trainer.all_reduce_timeout_s)
    try:
        yield ranks
    finally:
        dist.destroy_process_group()


def init_process_group(accelerator: str, timeout_s: float) -> None:
    """Meet the other ranks and sum one number with them, within ``timeout_s`` seconds.

    A first collective that hangs would otherwise hang for good and say nothing; past the limit
    this process ends with exit code 1 and names the usual remedies. Lightning joins a process
    group that it finds initialised.
    """
    watchdog = threading.Timer(timeout_s, _give_up, (timeout_s,))
    watchdog.daemon = True
    watchdog.start()
    try:
        dist.init_process_group("nccl" if accelerator == "gpu" else "gloo")
        one = torch.ones(1, device="cuda" if accelerator == "gpu" else "cpu")
        dist.all_reduce(one)
        assert int(one.item()) == dist.get_world_size()
    finally:
        watchdog.cancel()


def _give_up(timeout_s: float) -> None:
    print(
        f"error: [rank {os.environ.get('RANK')}] the first all-reduce over "
        f"{os.environ.get('WORLD_SIZE')} ranks did not end within {timeout_s:g} s.\n{_REMEDIES}",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)  # the main thread hangs inside a collective and cannot be asked to stop


def shared_run(config: Config, job: Job, ranks: Ranks) -> Run:
    """The run folder, made by rank 0 and told to the others."""
    run = start_run(config, job) if ranks.rank == 0 else None
    if ranks.world_size > 1:
        told = [run]
        dist.broadcast_object_list(told)
        run = told[0]
    assert run is not None
    return replace(run, is_main=ranks.rank == 0)


def launch_ranks(run_dir: Path, devices: object, grace_s: float = _GRACE_S) -> int:
    """Start one process per device on the run in ``run_dir`` and wait for all of them.

    SIGTERM and SIGINT are passed on to the ranks. When one rank fails, or a signal came, the others
    get ``grace_s`` seconds and are then killed; no process is left behind.

    Returns:
        0, or the exit code of the rank that failed first (128 + signal number if a signal
        ended it).
    """
    received: list[int] = []

    def forward(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        _signal_all(processes, signum)

    # a signal that is ignored (nohup, background jobs) stays ignored; SIGHUP is never touched
    watched = [s for s in _FORWARDED if signal.getsignal(s) is not signal.SIG_IGN]
    processes: list[subprocess.Popen[bytes]] = []
    previous = {signum: signal.signal(signum, forward) for signum in watched}
    try:
        processes += _start(run_dir, device_count(devices))
        code = _wait(processes, received, grace_s)
    finally:
        _kill(processes)
        for signum, handler in previous.items():
            signal.signal(signum, handler)
    if received:
        signal.raise_signal(received[0])  # end, or unwind, as any process does on this signal
    return code


def _start(run_dir: Path, world_size: int) -> list[subprocess.Popen[bytes]]:
    threads = max(1, (os.cpu_count() or 1) // world_size)
    shared = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }
    return [
        subprocess.Popen(
            [sys.executable, "-m", "eagle3.worker", str(run_dir)],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,  # closes when this process is gone, which ends the rank
            process_group=0,  # signals of the terminal reach the ranks through us, once
        )
        for rank in range(world_size)
    ]


def _wait(processes: list[subprocess.Popen[bytes]], received: list[int], grace_s: float) -> int:
    """Exit code of the first rank that failed; the others are ended after it."""
    deadline: float | None = None
    code = 0
    while any(process.poll() is None for process in processes):
        failed = [p.returncode for p in processes if p.returncode]
        if deadline is None and (failed or received):
            code = _exit_code(failed[0]) if failed else 0
            deadline = time.monotonic() + grace_s
            if not received:
                _signal_all(processes, signal.SIGTERM)
        if deadline is not None and time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    failed = [p.returncode for p in processes if p.returncode]
    return code or (_exit_code(failed[0]) if failed else 0)


def _exit_code(returncode: int) -> int:
    return returncode if returncode > 0 else 128 - returncode


def _signal_all(processes: list[subprocess.Popen[bytes]], signum: int) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(signum)


def _kill(processes: list[subprocess.Popen[bytes]]) -> None:
    """Kill what is still there, each rank with the processes of its group."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def end_with_parent(grace_s: float = _GRACE_S) -> None:
    """End this rank when the process that launched it is gone, however that came about."""

    def watch() -> None:
        sys.stdin.buffer.read()  # blocks until the launcher's end of the pipe is closed
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
