"""What a ``torch.save`` file holds, from its pickle alone.

The pickles of a directory differ in a few numbers only (lengths). So the machine that reads them
(:mod:`eagle3.data.pickle_machine`) runs once for each *template*, a pickle with places for
numbers, and later files only fill in theirs::

    first file   ... storage '0'  K 00  M 31 09  ...     shape (2353,)
    template     ... storage '0'  K __  M __ __  ...     shape (number 1,)
    next file    ... storage '0'  K 00  M 07 12  ...     shape (4615,)
"""

from __future__ import annotations

import struct
from typing import Any

from eagle3.data.pickle_machine import PickleMachine
from eagle3.data.pickle_values import PickledTensor

_MAX_TEMPLATES = 256
_Skeleton = dict[str, PickledTensor | list[PickledTensor]]
"""Tensors by key, with the places of numbers, among the pickle's numbers, instead of numbers."""


class PickleReader:
    """Reads pickles, fast when they resemble earlier ones. Safe to use from several threads."""

    def __init__(self) -> None:
        self._templates: dict[int, tuple[_Template, ...]] = {}

    def read(self, content: bytes) -> Any:
        """The saved object, every tensor as a :class:`PickledTensor`.

        Raises:
            NotTensorsError: it holds other objects.
            DamagedPickleError: it ends early or makes no sense.
        """
        known = self._templates.get(len(content), ())
        for template in known:
            found = template.fill(content)
            if found is not None:
                return found
        machine = PickleMachine(content)
        result = machine.run()
        skeleton = _skeleton(result)
        if skeleton is not None and len(self._templates) < _MAX_TEMPLATES:
            self._templates[len(content)] = (*known[-3:], _Template(machine, skeleton))
        return result


class _Template:
    """The object in a pickle as a function of the numbers in it."""

    def __init__(self, machine: PickleMachine, skeleton: _Skeleton) -> None:
        layout, at = "<", 0
        for start, kind in machine.numbers:
            layout += f"{start - at}s{kind}"
            at = start + struct.calcsize(f"<{kind}")
        self._layout = struct.Struct(f"{layout}{len(machine.content) - at}s")
        self._constant = self._layout.unpack(machine.content)[::2]
        self._skeleton = skeleton

    def fill(self, content: bytes) -> _Skeleton | None:
        """The object of another pickle of this size; None when more than numbers differs."""
        parts = self._layout.unpack(content)
        numbers = parts[1::2]
        if parts[::2] != self._constant or min(numbers, default=0) < 0:
            return None
        return {
            key: _filled(value, numbers)
            if isinstance(value, PickledTensor)
            else [_filled(tensor, numbers) for tensor in value]
            for key, value in self._skeleton.items()
        }


def _filled(tensor: PickledTensor, numbers: tuple[int, ...]) -> PickledTensor:
    storage, offset, shape, stride = tensor
    return PickledTensor(
        storage,
        numbers[offset],
        tuple([numbers[place] for place in shape]),
        tuple([numbers[place] for place in stride]),
    )


def _skeleton(result: Any) -> _Skeleton | None:
    """None for anything but a dict of tensors and lists of tensors."""
    if not isinstance(result, dict) or not all(isinstance(key, str) for key in result):
        return None
    try:
        return {
            key: [_places(v) for v in value] if isinstance(value, list) else _places(value)
            for key, value in result.items()
        }
    except AttributeError:  # of a number that is a part of the program, or of no tensor
        return None


def _places(tensor: Any) -> PickledTensor:
    return PickledTensor(
        tensor.storage,
        tensor.offset.number,
        tuple([size.number for size in tensor.shape]),
        tuple([step.number for step in tensor.stride]),
    )
