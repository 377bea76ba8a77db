"""The cards of this machine and those that can be planned for: size, speed, use, connection."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eagle3.checks import device_count
from eagle3.config import Config
from eagle3.names import Accelerator, CardName
from eagle3.preflighting.report import Report
from eagle3.resources import read_host

GB = 10**9
_BUSY_BYTES = 2 << 30
_QUERY = ("--query-gpu=index,memory.used", "--format=csv,noheader,nounits")
_RECORDED = ("NCCL_", "CUDA_VISIBLE_DEVICES", "GLOO_", "TORCH_NCCL_")


@dataclass(frozen=True)
class Device:
    """What a rank trains on."""

    name: str
    num_bytes: int
    """Memory that one rank may take."""
    tflops: float | None = None
    """Dense bfloat16 products with float32 sums, as the vendor states them; None: not known."""


CARDS = {
    CardName.rtx_pro_6000: Device("RTX PRO 6000", 96 * GB, 503.8),
    CardName.h100: Device("H100", 80 * GB, 989.0),
    CardName.h200: Device("H200", 141 * GB, 989.0),
    CardName.b200: Device("B200", 180 * GB, 2250.0),
}
"""Sizes as they are sold, taken as powers of ten. A driver shows some percent more, in GiB: what
fits here fits there. Speeds are of the SXM or workstation form."""


def cards_here() -> int:
    """Cards that torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def trains_on_cpu(config: Config, present: int) -> bool:
    """Whether ranks would be on CPU; a named card means that the run is planned for it."""
    accelerator = config.trainer.accelerator
    if accelerator is Accelerator.auto:
        return config.card is None and not present
    return accelerator is Accelerator.cpu


def planned_device(config: Config, present: int) -> Device | None:
    """The named card, else the smallest of those here, else the CPU; None: nobody says which."""
    if trains_on_cpu(config, present):
        available = read_host().available_bytes
        ranks = device_count(config.trainer.devices)
        return None if available is None else Device("CPU", available // ranks)
    if config.card is not None:
        return CARDS[config.card]
    if not present:
        return None
    found = [torch.cuda.get_device_properties(number) for number in range(present)]
    least = min(found, key=lambda properties: properties.total_memory)
    speed = [card.tflops for card in CARDS.values() if card.name in least.name]
    return Device(least.name, least.total_memory, speed[0] if speed else None)


def judge_cards(report: Report, config: Config, present: int) -> None:
    """Whether the cards that are asked for are here and free; how they are connected."""
    environment = {
        name: value for name, value in sorted(os.environ.items()) if name.startswith(_RECORDED)
    }
    report.facts["environment"] = environment
    if environment:
        report.tables.append([f"{name}={value}" for name, value in environment.items()])
    if trains_on_cpu(config, present):
        report.ok("cards", "none is used: training is on CPU")
        return
    devices = config.trainer.devices
    wanted = devices if isinstance(devices, list) else list(range(device_count(devices)))
    if not present:
        report.warn(
            "cards",
            f"this machine has none, trainer.devices={devices} asks for {len(wanted)}",
            "start the run where the cards are, or set trainer.accelerator=cpu",
        )
        return
    if max(wanted) >= present:
        report.stop(
            "cards",
            f"trainer.devices={devices}, but this machine has {present} that torch can use",
            f"set trainer.devices={min(len(wanted), present)} or start it on another machine",
        )
        return
    report.ok("cards", f"{len(wanted)} of the {present} here")
    _judge_use(report, wanted, present)
    topology = _nvidia_smi("topo", "-m")
    if topology is not None:
        report.facts["topology"] = topology
        report.tables.append(topology.rstrip().splitlines())


def _judge_use(report: Report, wanted: Sequence[int], present: int) -> None:
    answer = _nvidia_smi(*_QUERY)
    if answer is None:
        report.skip("busy cards", "nvidia-smi does not answer")
        return
    used = _used_bytes(answer)
    numbers = _visible(present)
    busy = {card: used.get(numbers[card], 0) for card in range(present)}
    taken = [card for card in wanted if busy[card] > _BUSY_BYTES]
    if not taken:
        report.ok("busy cards", "no other process holds memory of the cards asked for")
        return
    free = [card for card in range(present) if busy[card] <= _BUSY_BYTES]
    held = ", ".join(f"{card} ({busy[card] / GB:.1f} GB)" for card in taken)
    choice = ",".join(map(str, free[: len(wanted)]))
    report.warn(
        "busy cards",
        f"other processes hold memory of {held}",
        f"set 'trainer.devices=[{choice}]'" if len(free) >= len(wanted) else "wait for them",
    )


def _used_bytes(answer: str) -> dict[int, int]:
    """``0, 812`` a line: number of the card, MiB in use."""
    used = {}
    for line in answer.splitlines():
        number, _, mebibytes = line.partition(",")
        if number.strip().isdigit() and mebibytes.strip().isdigit():
            used[int(number)] = int(mebibytes) << 20
    return used


def _visible(present: int) -> list[int]:
    """Numbers that the driver gives to the cards that torch counts from 0."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if all(number.strip().isdigit() for number in listed) and len(listed) >= present:
        return [int(number) for number in listed]
    return list(range(present))


def _nvidia_smi(*arguments: str) -> str | None:
    """Its output; None where it is missing or fails."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
