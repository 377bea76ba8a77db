"""Ranks: the place of this process among them, and how they meet.

Several devices mean several processes, started by :mod:`eagle3.launch` or by ``torchrun``; both
tell a process its place through the same environment variables.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

# Defaults of its functions keep the group that is there when it is first imported, as DDP would do
# later: gloo's threads would then outlive the group, and abort a process that ends meanwhile.
import torch.distributed.nn

from eagle3.checks import device_count
from eagle3.compose import Job
from eagle3.config import Config, TrainerConfig
from eagle3.errors import ConfigError, TrainingError
from eagle3.names import Accelerator
from eagle3.provenance import Run
from eagle3.resume import begin

_REMEDIES = """\
Usual causes and remedies:
  - cards without peer access (PCIe-only Blackwell and others): export NCCL_P2P_DISABLE=1
  - a wrong network interface: export GLOO_SOCKET_IFNAME=eth0 (for NCCL: NCCL_SOCKET_IFNAME)
  - a rank did not start, or died before this point: read the messages of the other ranks
  - a slow machine: trainer.all_reduce_timeout_s=300"""
_LOST_PEER = ("closed by peer", "reset by peer", "broken pipe", "remote process exited")
"""What gloo and NCCL say when the process at the other end is gone."""


@dataclass(frozen=True)
class Ranks:
    """Place of this process among the ranks."""

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


@contextmanager
def process_group(config: Config) -> Iterator[Ranks]:
    """Join the other ranks, if there are any, and leave them when all went well.

    After an error the group is not left in order (NCCL would wait for ranks that are stuck in a
    collective); it goes down with the process.

    Raises:
        ConfigError: the number of processes is not what ``trainer.devices`` asks for.
        TrainingError: another rank went away in the middle of the work.
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
    sys.unraisablehook = _unless_lost_peer
    try:
        init_process_group(accelerator, config.trainer.all_reduce_timeout_s)
        yield ranks
    except SystemExit:  # all ranks have agreed to stop
        dist.destroy_process_group()
        raise
    except RuntimeError as error:
        if not lost_peer(error):
            raise
        raise TrainingError(
            "another rank ended while this one needed it, so this one ends too. Look for the "
            "message about that rank: it tells why."
        ) from error
    dist.destroy_process_group()


def lost_peer(error: BaseException) -> bool:
    """Whether ``error`` says only that another rank is gone; the fault is not here then."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _LOST_PEER)


def _unless_lost_peer(unraisable: sys.UnraisableHookArgs) -> None:
    """Python's report of errors where none can be raised, but for ranks that are gone.

    Lightning answers a signal with a broadcast, wherever this process happens to be.
    """
    if unraisable.exc_value is None or not lost_peer(unraisable.exc_value):
        sys.__unraisablehook__(unraisable)


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
    """The run folder, made or found by rank 0 and told to the others."""
    run = begin(config, job) if ranks.rank == 0 else None
    if ranks.world_size > 1:
        told = [run]
        dist.broadcast_object_list(told)
        run = told[0]
    assert run is not None
    return replace(run, is_main=ranks.rank == 0)
