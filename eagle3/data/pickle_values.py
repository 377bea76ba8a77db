"""What a ``torch.save`` pickle may name, and what its calls mean, without calling anything.

Calls that build tensors become records of their arguments. What else ``torch.load`` builds with
``weights_only=True`` (a dtype, a device, bytes, a set) may stand under keys that nobody reads; it
becomes an :class:`Opaque` value that only has a name. Every other name could stand for code.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple


class NotTensorsError(Exception):
    """The pickle needs more than tensors, dicts, lists and constants; says what."""


class DamagedPickleError(Exception):
    """Not a complete pickle."""


class Storage(NamedTuple):
    """A storage as the pickle refers to it."""

    kind: str
    """Name of its class in torch: ``BFloat16Storage``."""
    key: str
    """Its bytes are the record ``data/{key}``."""


class PickledTensor(NamedTuple):
    """Arguments of a tensor; all numbers are 0 or more."""

    storage: Storage
    offset: int
    """Elements before the first one."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Opaque:
    """A value that is neither a tensor nor needed; nothing is known of its content."""

    name: str
    """Of its type or of what builds it: ``torch.device``."""


class Named(NamedTuple):
    """A function or class that the pickle names."""

    name: str


_REBUILD = (
    *("_rebuild_tensor", "_rebuild_sparse_tensor", "_rebuild_nested_tensor", "_rebuild_qtensor"),
    *("_rebuild_meta_tensor_no_storage", "_rebuild_device_tensor_from_cpu_tensor"),
)
_HARMLESS = frozenset(
    {
        *("builtins.set", "builtins.frozenset", "builtins.complex", "builtins.bytes"),
        *("builtins.bytearray", "_codecs.encode", "collections.Counter", "torch.device"),
        *("torch.Tensor", "torch.nn.parameter.Parameter", "torch.serialization._get_layout"),
        *("torch._tensor._rebuild_from_type_v2", *(f"torch._utils.{name}" for name in _REBUILD)),
    }
)
"""What only builds values, as torch lists it for ``weights_only``; never called here either."""
_DTYPE = re.compile(r"(bool|(q?u?int|b?float|complex|bits)\d\w*|per_(tensor|channel)_\w+)")


def known(module: str, name: str) -> Named | Opaque:
    """A global that the pickle names.

    Raises:
        NotTensorsError: it could run code.
    """
    path = f"{'builtins' if module == '__builtin__' else module}.{name}"
    if path in _BUILDERS or path in _HARMLESS:
        return Named(path)
    if module in ("torch", "torch.storage") and name.endswith("Storage"):
        return Named(name)
    if module == "torch" and _DTYPE.fullmatch(name):
        return Opaque(path)
    raise NotTensorsError(path)


def build(function: Any, arguments: Any) -> Any:
    """What a call of ``function`` stands for.

    Raises:
        NotTensorsError: it would do more than build values.
        DamagedPickleError, TypeError: it cannot have these arguments.
    """
    name = function.name if isinstance(function, Named) else "a call of a value"
    if name in _BUILDERS:
        return _BUILDERS[name](*arguments)
    if name in _HARMLESS:
        return Opaque(name)
    raise NotTensorsError(name)


def _ordered_dict(*items: Any) -> Any:
    return Opaque("collections.OrderedDict") if items else {}


def _first(value: Any, *_: Any) -> Any:
    """A size is its numbers, a parameter its tensor."""
    return value


def _tensor_of_dtype(*arguments: Any) -> PickledTensor:
    """A tensor whose storage is plain bytes, as dtypes without a storage class are saved."""
    storage, offset, shape, stride, _, _, dtype, *_ = arguments
    if not isinstance(storage, Storage) or not isinstance(dtype, Opaque):
        raise DamagedPickleError("a tensor without a storage")
    typed = Storage(dtype.name.removeprefix("torch."), storage.key)
    return _tensor(typed, offset, shape, stride)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> PickledTensor:
    usable = isinstance(shape, tuple) and isinstance(stride, tuple) and len(shape) == len(stride)
    if not usable or not all(isinstance(n, int) and n >= 0 for n in (offset, *shape, *stride)):
        raise DamagedPickleError("a tensor without a shape")
    if not isinstance(storage, Storage):
        raise DamagedPickleError("a tensor without a storage")
    return PickledTensor(storage, offset, shape, stride)


_BUILDERS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch.Size": _first,
    "collections.OrderedDict": _ordered_dict,
}
