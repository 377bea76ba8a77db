"""Where the tensors of a safetensors file lie, without loading it.

::

    8 bytes     size n of the header, little-endian
    n bytes     JSON: name -> dtype, shape, data_offsets [first, stop) after the header
    the rest    the tensors, end to end

The header is checked as a whole before any place in it is believed: a cut file, overlapping
tensors or a range past the end are errors, not wrong states.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from eagle3.data.plain_file import open_plain
from eagle3.errors import DataError

MAX_HEADER_BYTES = 100_000_000
"""As the safetensors library allows."""
_SIZE = struct.Struct("<Q")
_HEAD_BYTES = 65536
_DTYPES = {
    "BF16": ("bfloat16", 2),
    "F16": ("float16", 2),
    "F32": ("float32", 4),
    "F64": ("float64", 8),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in the file; its rows lie one after another."""

    dtype: str
    """Named as in torch."""
    shape: tuple[int, ...]
    offset: int
    """Byte of the file with its first element."""
    num_bytes: int


class SafetensorsFile:
    """An open safetensors file. Use as a context manager.

    Raises:
        DataError: not such a file, or a cut or damaged one; from every method.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open_plain(path)
        except OSError as error:
            raise _unreadable(path, error) from error
        try:
            self.size = os.fstat(self._file).st_size
            self._head = os.pread(self._file, _HEAD_BYTES, 0)
            self.tensors = self._parse()
        except OSError as error:
            self.close()
            raise _unreadable(path, error) from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def read(self, offset: int, count: int) -> bytes:
        """``count`` bytes from ``offset``; a range near the start was read on opening."""
        if offset + count <= len(self._head):
            return self._head[offset : offset + count]
        parts, at = [], offset
        while at < offset + count:
            try:
                parts.append(os.pread(self._file, offset + count - at, at))
            except OSError as error:
                raise _unreadable(self.path, error) from error
            if not parts[-1]:
                raise self._cut(offset + count)
            at += len(parts[-1])
        return b"".join(parts)

    def _parse(self) -> dict[str, StoredTensor]:
        header = self._header()
        header.pop("__metadata__", None)
        start = _SIZE.size + self._header_bytes
        tensors = {
            name: _tensor(entry, start, f"{self.path}: key '{name}'")
            for name, entry in header.items()
        }
        end = start
        for name, tensor in sorted(tensors.items(), key=_by_place):
            if tensor.offset != end:
                raise DataError(
                    f"{self.path}: key '{name}': found its first byte at {tensor.offset:,}, "
                    f"expected {end:,}, the end of the tensor before it: tensors that overlap or "
                    "leave a gap. The header is damaged; capture the sample again."
                )
            end += tensor.num_bytes
        if end > self.size:
            raise self._cut(end)
        if end < self.size:
            raise DataError(
                f"{self.path}: found {self.size:,} bytes, expected {end:,}: the header does not "
                "know what follows its tensors. Capture the sample again."
            )
        return tensors

    def _header(self) -> dict[str, Any]:
        if self.size < _SIZE.size:
            raise self._cut(_SIZE.size)
        (count,) = _SIZE.unpack_from(self._head)
        if count > MAX_HEADER_BYTES:
            raise DataError(
                f"{self.path}: found a header of {count:,} bytes, expected at most "
                f"{MAX_HEADER_BYTES:,}. Is it a safetensors file? Copy or capture it again."
            )
        if _SIZE.size + count > self.size:
            raise self._cut(_SIZE.size + count)
        self._header_bytes = count
        try:
            pairs = json.loads(self.read(_SIZE.size, count), object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{self.path}: found a header that is not valid JSON ({error}), expected the names "
                "of tensors. Is it a safetensors file? Copy or capture it again."
            ) from error
        if not isinstance(pairs, dict):
            raise DataError(
                f"{self.path}: found a header that is a {type(pairs).__name__}, expected a JSON "
                "object. Is it a safetensors file? Copy or capture it again."
            )
        return pairs

    def _cut(self, expected: int) -> DataError:
        return DataError(
            f"{self.path}: found {self.size:,} bytes, expected {expected:,} or more: the file is "
            "cut off. Copy or capture it again."
        )


def _by_place(item: tuple[str, StoredTensor]) -> tuple[int, int]:
    """Tensors without bytes share their place with the one that follows."""
    return item[1].offset, item[1].num_bytes


def _tensor(entry: Any, start: int, where: str) -> StoredTensor:
    if not isinstance(entry, dict) or entry.get("dtype") not in _DTYPES:
        found = entry.get("dtype") if isinstance(entry, dict) else entry
        raise DataError(
            f"{where}: found dtype {found!r}, expected one of {', '.join(_DTYPES)}. "
            "Capture the sample again."
        )
    dtype, itemsize = _DTYPES[entry["dtype"]]
    shape, place = entry.get("shape"), entry.get("data_offsets")
    if not _is_sizes(shape) or not _is_sizes(place) or len(place) != 2:
        raise DataError(
            f"{where}: found shape {shape!r} and data_offsets {place!r}, expected sizes and a "
            "range of bytes. The header is damaged; capture the sample again."
        )
    needed = math.prod(shape) * itemsize
    if place[1] - place[0] != needed:
        raise DataError(
            f"{where}: found {place[1] - place[0]:,} bytes, expected {needed:,} for shape {shape} "
            f"in {dtype}. The header is damaged; capture the sample again."
        )
    return StoredTensor(dtype, tuple(shape), start + place[0], needed)


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names differ; the second one of a pair would hide the first."""
    found = dict(pairs)
    if len(found) != len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"'{name}' comes twice")
    return found


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path}: cannot be read ({error}). Check the disk and the file.")
