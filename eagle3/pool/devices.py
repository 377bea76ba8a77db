"""The devices of a pool: which there are, and which are free."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eagle3.errors import ConfigError

_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Devices:
    """Cards by the names CUDA knows them by, or as many nameless slots of a CPU."""

    names: tuple[str, ...]
    are_cards: bool

    def __str__(self) -> str:
        if self.are_cards:
            return ("card " if len(self.names) == 1 else "cards ") + ",".join(self.names)
        return f"{len(self.names)} slot(s)"

    def part(self, names: Sequence[str]) -> Devices:
        """Some of these devices."""
        return Devices(tuple(names), self.are_cards)

    def environment(self, whole: Devices, given: Mapping[str, str]) -> dict[str, str]:
        """``given`` for a job on these devices of the pool ``whole``.

        Slots hide all cards: two jobs would otherwise meet on the first one. Each process gets its
        share of the cores, unless ``OMP_NUM_THREADS`` says how many.
        """
        threads = max(1, (os.cpu_count() or 1) // len(whole.names))
        visible = ",".join(self.names) if self.are_cards else ""
        return {"OMP_NUM_THREADS": str(threads), **given, _VISIBLE: visible}


def find_devices(cards: Sequence[object] | None, slots: int | None) -> Devices:
    """The devices of a pool from ``hydra.launcher.cards`` and ``hydra.launcher.slots``.

    Without both it holds every card that this process sees.

    Raises:
        ConfigError: there is none, a card is named twice, or both are given.
    """
    if cards is not None and slots is not None:
        raise ConfigError(
            f"hydra.launcher.cards={list(cards)} and hydra.launcher.slots={slots} are both set: "
            "give cards for jobs on cards, or slots for jobs on the CPU"
        )
    if slots is not None:
        if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
            raise ConfigError(
                f"hydra.launcher.slots={slots!r}: expected a count >= 1 of processes at once"
            )
        return Devices(tuple(str(slot) for slot in range(slots)), are_cards=False)
    names = _visible_cards() if cards is None else tuple(str(card) for card in cards)
    if not names:
        raise ConfigError(
            "hydra/launcher=gpu_pool found no card here: give hydra.launcher.cards=[0,1] if there "
            "are some, or hydra.launcher.slots=2 with trainer.accelerator=cpu for jobs on the CPU"
        )
    if len(set(names)) < len(names):
        raise ConfigError(f"hydra.launcher.cards names a card twice: {', '.join(names)}")
    return Devices(names, are_cards=True)


def _visible_cards() -> tuple[str, ...]:
    given = os.environ.get(_VISIBLE)
    if given is None:
        import torch  # takes seconds, and in slots nobody asks

        return tuple(str(card) for card in range(torch.cuda.device_count()))
    return tuple(name.strip() for name in given.split(",") if name.strip())


class FreeDevices:
    """The devices of a pool that no job holds, lowest first."""

    def __init__(self, devices: Devices) -> None:
        self._all = devices
        self._free = list(devices.names)

    def take(self, count: int) -> Devices | None:
        """``count`` devices, held until :meth:`give`; null while so many are not free."""
        if count > len(self._free):
            return None
        taken, self._free = self._free[:count], self._free[count:]
        return self._all.part(taken)

    def give(self, devices: Devices) -> None:
        """Take devices back."""
        free = {*self._free, *devices.names}
        self._free = [name for name in self._all.names if name in free]
