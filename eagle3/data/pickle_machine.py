"""A machine that runs the pickle of a ``torch.save`` file without loading anything.

A pickle is a program for a small stack machine. Files of tensors need few of its instructions:
constants, tuples, lists, dicts, and calls of the functions that build tensors::

    {'input_ids': _rebuild_tensor_v2(storage '0' of LongStorage, offset 0, (n,), (1,), ...), ...}

This machine knows only these, and turns the calls into records of their arguments. It imports
nothing, calls nothing that a file names, and its memory is bounded by the size of the pickle, so
a hostile file costs no more than a damaged one. What a file names, and what its calls mean, is
judged by :mod:`eagle3.data.pickle_values`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

from eagle3.data.pickle_values import (
    DamagedPickleError,
    Named,
    NotTensorsError,
    Opaque,
    Storage,
    build,
    known,
)


class Place(int):
    """A number in the pickle that knows where it stands."""

    number: int
    """Its place among the numbers of the pickle."""


_MARK: Final = object()
_STOP = 0x2E
_UINT8, _UINT16, _INT32 = struct.Struct("<B"), struct.Struct("<H"), struct.Struct("<i")
_UINT32, _UINT64, _FLOAT64 = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct(">d")


class PickleMachine:
    """Runs one pickle."""

    __slots__ = ("at", "content", "memo", "numbers", "stack")

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.at = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.numbers: list[tuple[int, str]] = []
        """Byte and struct format of every number pushed so far."""

    def run(self) -> Any:
        """The saved object, every tensor as a :class:`PickledTensor`.

        Raises:
            NotTensorsError: it holds other objects.
            DamagedPickleError: it ends early or makes no sense.
        """
        try:
            self._run()
            (result,) = self.stack
        except (LookupError, ValueError, TypeError, struct.error) as error:
            raise DamagedPickleError(str(error)) from error
        return result

    def _run(self) -> None:
        content = self.content
        while (code := content[self.at]) != _STOP:
            self.at += 1
            instruction = _INSTRUCTIONS.get(code)
            if instruction is None:
                raise NotTensorsError(f"pickle instruction {code:#04x}")
            instruction(self)

    def take(self, count: int) -> bytes:
        """The next bytes of the program."""
        start, self.at = self.at, self.at + count
        if self.at > len(self.content):
            raise DamagedPickleError("ends early")
        return self.content[start : self.at]

    def number(self, layout: struct.Struct) -> Any:
        """The next number of the program."""
        (found,) = layout.unpack_from(self.content, self.at)
        self.at += layout.size
        return found

    def line(self) -> str:
        """The next line of the program."""
        end = self.content.index(b"\n", self.at)
        found = self.content[self.at : end].decode()
        self.at = end + 1
        return found

    def pop_to_mark(self) -> list[Any]:
        """What was pushed since the last mark."""
        stack = self.stack
        at = len(stack) - 1
        while stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise DamagedPickleError("no mark")
        found = stack[at + 1 :]
        del stack[at:]
        return found


def _byte(machine: PickleMachine) -> int:
    found = machine.content[machine.at]
    machine.at += 1
    return found


def _mark(machine: PickleMachine) -> None:
    machine.stack.append(_MARK)


def _put(machine: PickleMachine) -> None:
    machine.memo[_byte(machine)] = machine.stack[-1]


def _get(machine: PickleMachine) -> None:
    machine.stack.append(machine.memo[_byte(machine)])


def _text(machine: PickleMachine) -> None:
    machine.stack.append(machine.take(machine.number(_UINT32)).decode())


def _tuple(machine: PickleMachine) -> None:
    machine.stack.append(tuple(machine.pop_to_mark()))


def _last_as_tuple(count: int) -> Callable[[PickleMachine], None]:
    def instruction(machine: PickleMachine) -> None:
        found = tuple(machine.stack[-count:])
        if len(found) != count:
            raise DamagedPickleError("too few values")
        machine.stack[-count:] = [found]

    return instruction


def _constant(value: Any) -> Callable[[PickleMachine], None]:
    return lambda machine: machine.stack.append(value)


def _named(machine: PickleMachine) -> None:
    machine.stack.append(known(machine.line(), machine.line()))


def _named_on_stack(machine: PickleMachine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(known(str(module), str(name)))


def _storage(machine: PickleMachine) -> None:
    _, kind, key, *_ = machine.stack.pop()
    if not isinstance(kind, Named) or not isinstance(key, str):
        raise DamagedPickleError("no storage")
    machine.stack.append(Storage(kind.name, key))


def _call(machine: PickleMachine) -> None:
    arguments, function = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(build(function, arguments))


def _set_attributes(machine: PickleMachine) -> None:
    """Of an ordered dict, as a module's state has them; dropped."""
    machine.stack.pop()
    if not isinstance(machine.stack[-1], dict | Opaque):
        raise NotTensorsError("attributes of a value")


def _set_items(machine: PickleMachine) -> None:
    items = machine.pop_to_mark()
    _fill(machine, items)


def _set_item(machine: PickleMachine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _fill(machine, [key, value])


def _fill(machine: PickleMachine, items: list[Any]) -> None:
    target = machine.stack[-1]
    keys = items[::2]
    if not isinstance(target, dict) or len(items) % 2:
        raise DamagedPickleError("items without a dict")
    if not all(isinstance(key, str | int) for key in keys):
        raise NotTensorsError("a dict whose keys are neither text nor integers")
    target.update(zip(keys, items[1::2], strict=True))


def _append(machine: PickleMachine) -> None:
    value = machine.stack.pop()
    _extend(machine, [value])


def _appends(machine: PickleMachine) -> None:
    values = machine.pop_to_mark()
    _extend(machine, values)


def _extend(machine: PickleMachine, values: list[Any]) -> None:
    target = machine.stack[-1]
    if not isinstance(target, list):
        raise DamagedPickleError("values without a list")
    target += values


def _add_to_set(machine: PickleMachine) -> None:
    machine.pop_to_mark()
    if not isinstance(machine.stack[-1], Opaque):
        raise DamagedPickleError("values without a set")


def _frozen_set(machine: PickleMachine) -> None:
    machine.pop_to_mark()
    machine.stack.append(Opaque("builtins.frozenset"))


def _put_next(machine: PickleMachine) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _put_at(machine: PickleMachine) -> None:
    machine.memo[machine.number(_UINT32)] = machine.stack[-1]


def _get_at(machine: PickleMachine) -> None:
    machine.stack.append(machine.memo[machine.number(_UINT32)])


def _int(layout: struct.Struct) -> Callable[[PickleMachine], None]:
    kind = layout.format.removeprefix("<")

    def instruction(machine: PickleMachine) -> None:
        at = machine.at
        found = Place(machine.number(layout))
        found.number = len(machine.numbers)
        machine.numbers.append((at, kind))
        machine.stack.append(found)

    return instruction


def _float(machine: PickleMachine) -> None:
    machine.stack.append(machine.number(_FLOAT64))


def _long(machine: PickleMachine) -> None:
    machine.stack.append(int.from_bytes(machine.take(_byte(machine)), "little", signed=True))


def _short_text(machine: PickleMachine) -> None:
    machine.stack.append(machine.take(_byte(machine)).decode())


def _bytes(layout: struct.Struct) -> Callable[[PickleMachine], None]:
    return lambda machine: machine.stack.append(machine.take(machine.number(layout)))


def _skip(count: int) -> Callable[[PickleMachine], None]:
    def instruction(machine: PickleMachine) -> None:
        machine.take(count)

    return instruction


_INSTRUCTIONS: dict[int, Callable[[PickleMachine], None]] = {
    0x80: _skip(1),  # protocol number
    0x95: _skip(8),  # size of a frame
    ord("("): _mark,
    ord("}"): lambda machine: machine.stack.append({}),
    ord("]"): lambda machine: machine.stack.append([]),
    ord(")"): _constant(()),
    ord("t"): _tuple,
    0x85: _last_as_tuple(1),
    0x86: _last_as_tuple(2),
    0x87: _last_as_tuple(3),
    ord("s"): _set_item,
    ord("u"): _set_items,
    ord("b"): _set_attributes,
    0x8F: _constant(Opaque("builtins.set")),
    0x90: _add_to_set,
    0x91: _frozen_set,
    ord("a"): _append,
    ord("e"): _appends,
    ord("q"): _put,
    ord("r"): _put_at,
    0x94: _put_next,
    ord("h"): _get,
    ord("j"): _get_at,
    ord("c"): _named,
    0x93: _named_on_stack,
    ord("Q"): _storage,
    ord("R"): _call,
    ord("N"): _constant(None),
    0x88: _constant(True),
    0x89: _constant(False),
    ord("J"): _int(_INT32),
    ord("K"): _int(_UINT8),
    ord("M"): _int(_UINT16),
    ord("G"): _float,
    0x8A: _long,
    ord("X"): _text,
    0x8C: _short_text,
    ord("C"): _bytes(_UINT8),
    ord("B"): _bytes(_UINT32),
    0x8E: _bytes(_UINT64),
    0x96: _bytes(_UINT64),
}
