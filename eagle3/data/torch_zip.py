"""Where the tensors of a ``torch.save`` file lie, without loading it.

The file is a zip archive whose records are stored uncompressed::

    name/data.pkl   the saved object, pickled; a tensor is (storage key, offset, shape, stride)
    name/byteorder  little or big
    name/data/0     bytes of storage 0
    ...
    directory       name, size, CRC-32 and place of every record, at the end of the file

    a record:  | header, name, padding to 64 | data | descriptor | next record ...
               header                        start  start + size  end

so the bytes of a tensor are one range of the file. Two reads, of the start and of the end of a
file, find everything unless the token ids are long; the states are not touched.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from eagle3.data.pickle_values import DamagedPickleError, NotTensorsError, Opaque, PickledTensor
from eagle3.data.plain_file import open_plain
from eagle3.data.torch_pickle import PickleReader
from eagle3.errors import DataError

_END = struct.Struct("<4s4xHHIIH")
_END_MAGIC = b"PK\x05\x06"
_END64_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_ENTRY = struct.Struct("<4s4xHH4xIIIHHH8xI")
_LOCAL = struct.Struct("<4s22xHH")
_TAIL_BYTES = 4096
_HEAD_BYTES = 65536
_MAX_PICKLE_BYTES = 1 << 20
_ALIGNMENT = 64
_DESCRIPTOR_BYTES = (0, 12, 16, 20, 24)
_STORED = 0
_ENCRYPTED = 1
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_DTYPES = {
    "BFloat16Storage": ("bfloat16", 2),
    "HalfStorage": ("float16", 2),
    "FloatStorage": ("float32", 4),
    "DoubleStorage": ("float64", 8),
    "LongStorage": ("int64", 8),
    "IntStorage": ("int32", 4),
    "ShortStorage": ("int16", 2),
    "CharStorage": ("int8", 1),
    "ByteStorage": ("uint8", 1),
    "BoolStorage": ("bool", 1),
    "ComplexFloatStorage": ("complex64", 8),
    "ComplexDoubleStorage": ("complex128", 16),
    "uint16": ("uint16", 2),
    "uint32": ("uint32", 4),
    "uint64": ("uint64", 8),
    "float8_e4m3fn": ("float8_e4m3fn", 1),
    "float8_e5m2": ("float8_e5m2", 1),
}
"""By storage class, or by dtype where a storage is plain bytes."""
_PICKLES = PickleReader()


class Entry(NamedTuple):
    """One record of the archive."""

    name: str
    header: int
    """Byte of its local header."""
    size: int
    """Bytes of its data."""
    crc32: int
    """Of its data; 0: not computed, which ``torch.save`` can be told."""
    end: int
    """Byte where the next record, or the directory, begins."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in the file."""

    dtype: str
    itemsize: int
    """Bytes of an element."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Elements."""
    offset: int
    """Byte of its first element."""
    record: Entry
    """Its storage, which other tensors may share."""

    @property
    def is_contiguous(self) -> bool:
        """Rows lie one after another without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return 0 in self.shape
            expected *= size
        return True

    @property
    def nbytes(self) -> int:
        """Size in bytes, for a contiguous tensor."""
        size = self.itemsize
        for count in self.shape:
            size *= count
        return size


class TorchZip:
    """An open ``torch.save`` file. Use as a context manager.

    Raises:
        DataError: not such a file, or a cut or damaged one; from every method.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open_plain(path)
        except OSError as error:
            raise unreadable(path, error) from error
        try:
            self.entries: dict[str, Entry] = {}
            self.size = os.fstat(self._file).st_size
            self._head = os.pread(self._file, _HEAD_BYTES, 0)
            self.entries = self._read_directory()
        except OSError as error:
            self.close()
            raise unreadable(path, error) from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> TorchZip:
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
        try:
            found = os.pread(self._file, count, offset)
        except OSError as error:
            raise unreadable(self.path, error) from error
        if len(found) != count:
            raise self.damaged("it ends early")
        return found

    def values(self, tensor: StoredTensor) -> bytes:
        """The bytes of a contiguous tensor, checked by the CRC-32 of its record if it fills it."""
        found = self.read(tensor.offset, tensor.nbytes)
        if len(found) == tensor.record.size:
            self._check(tensor.record, found)
        return found

    def content(self) -> Any:
        """The saved object; a tensor in it, in a dict or in a list is a :class:`StoredTensor`.

        What else is in it and could run no code is an :class:`eagle3.data.pickle_values.Opaque`.
        """
        pickles = [name for name in self.entries if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise self.damaged("no pickle in it")
        root = pickles[0].removesuffix("data.pkl")
        order = self.entries.get(f"{root}byteorder")
        if order is not None and self._record(order) != b"little":
            raise DataError(
                f"{self.path}: found big-endian numbers, expected little-endian ones. Save it "
                "again on a little-endian machine."
            )
        try:
            return self._unpickled(self.entries[pickles[0]], root)
        except DamagedPickleError as error:
            raise self.damaged(f"its pickle makes no sense: {error}") from error
        except NotTensorsError as error:
            raise DataError(
                f"{self.path}: found objects that are not tensors ({error}), expected a dict of "
                "tensors. Such a file is not loaded, because it could run code; save it again "
                "without them, or capture it again."
            ) from error

    def start(self, entry: Entry) -> int:
        """Byte of the first byte of a record's data."""
        # Padding as torch writes it, and a descriptor that ends where the next record begins: when
        # both say the same, the header need not be read, which would cost a page of a cold disk.
        unpadded = entry.header + _LOCAL.size + len(entry.name) + 4
        start = unpadded + -unpadded % _ALIGNMENT
        if start + entry.size + 16 == entry.end:
            return start
        name = entry.name.encode()
        header = self.read(entry.header, _LOCAL.size + len(name))
        magic, name_size, extra_size = _LOCAL.unpack_from(header)
        start = entry.header + _LOCAL.size + name_size + extra_size
        if magic != b"PK\x03\x04" or header[_LOCAL.size :] != name:
            raise self.damaged(f"no record {entry.name} where the directory says")
        if entry.end - start - entry.size not in _DESCRIPTOR_BYTES:
            raise self.damaged(f"record {entry.name} has another size than the directory says")
        return int(start)

    def _record(self, entry: Entry) -> bytes:
        found = self.read(self.start(entry), entry.size)
        self._check(entry, found)
        return found

    def _check(self, entry: Entry, found: bytes) -> None:
        if entry.crc32 and zlib.crc32(found) != entry.crc32:
            raise self.damaged(f"record {entry.name} does not match its CRC-32")

    def _unpickled(self, entry: Entry, root: str) -> Any:
        if entry.size > _MAX_PICKLE_BYTES:
            raise NotTensorsError(f"a pickle of {entry.size:,} bytes")
        found = _PICKLES.read(self._record(entry))
        if isinstance(found, dict):
            return {key: self._resolve(value, root) for key, value in found.items()}
        return self._resolve(found, root)

    def _resolve(self, found: Any, root: str) -> Any:
        if isinstance(found, PickledTensor):
            return self._tensor(found, root)
        if isinstance(found, list | tuple):
            return [self._tensor(v, root) if isinstance(v, PickledTensor) else v for v in found]
        return found

    def _tensor(self, found: PickledTensor, root: str) -> StoredTensor | Opaque:
        storage, offset, shape, stride = found
        if storage.kind not in _DTYPES:
            return Opaque(f"a tensor of {storage.kind}")
        dtype, itemsize = _DTYPES[storage.kind]
        entry = self.entries.get(f"{root}data/{storage.key}")
        if entry is None:
            raise self.damaged(f"no storage {storage.key}")
        last = offset
        for size, step in zip(shape, stride, strict=True):
            last += (size - 1) * step
        if 0 not in shape and (last + 1) * itemsize > entry.size:
            raise self.damaged(f"a tensor ends after its storage {storage.key}")
        return StoredTensor(
            dtype, itemsize, shape, stride, self.start(entry) + offset * itemsize, entry
        )

    def _read_directory(self) -> dict[str, Entry]:
        tail_start = max(0, self.size - _TAIL_BYTES)
        tail = self.read(tail_start, self.size - tail_start)
        at = tail.rfind(_END_MAGIC)
        if at < 0 or at + _END.size > len(tail):
            raise self.damaged("it has no directory at its end")
        _, _, count, size, offset, _ = _END.unpack_from(tail, at)
        if offset == _FULL32 or count == _FULL16 or size == _FULL32:
            count, size, offset = self._read_end64(tail, at)
        if offset + size > tail_start + at:
            raise self.damaged("its directory lies outside")
        if offset >= tail_start:
            directory = tail[offset - tail_start : offset - tail_start + size]
        else:
            directory = self.read(offset, size)
        try:
            return _entries(directory, count, offset)
        except _CompressedError as error:
            raise DataError(
                f"{self.path}: found a compressed or encrypted record {error}, expected a file "
                "as torch.save writes it. Load it and save it again with torch.save."
            ) from error
        except (struct.error, ValueError) as error:
            raise self.damaged("its directory makes no sense") from error

    def _read_end64(self, tail: bytes, at: int) -> tuple[int, int, int]:
        """Count, size and offset of the directory of a large archive."""
        if at >= _END64_LOCATOR.size:
            magic, _, end, _ = _END64_LOCATOR.unpack_from(tail, at - _END64_LOCATOR.size)
            if magic == b"PK\x06\x07" and end + _END64.size <= self.size:
                fields = _END64.unpack(self.read(end, _END64.size))
                if fields[0] == b"PK\x06\x06":
                    return fields[7], fields[8], fields[9]
        raise self.damaged("its directory has no place")

    def damaged(self, what: str) -> DataError:
        """The error for bytes that are wrong."""
        is_zip = bool(self.entries) or self._head.startswith(b"PK\x03\x04")
        return _damaged(self.path, self.size, what) if is_zip else _no_zip(self.path, self.size)


class _CompressedError(Exception):
    """A record that must be unpacked before it is read."""


def _entries(directory: bytes, count: int, end: int) -> dict[str, Entry]:
    """The records by name; ``end`` is where the directory begins."""
    found = []
    at = 0
    for _ in range(count):
        magic, flags, method, crc32, packed, size, name_size, extra_size, comment_size, header = (
            _ENTRY.unpack_from(directory, at)
        )
        if magic != b"PK\x01\x02":
            raise ValueError("not a record")
        at += _ENTRY.size
        name = directory[at : at + name_size].decode()
        if method != _STORED or flags & _ENCRYPTED:
            raise _CompressedError(name)
        at += name_size
        if _FULL32 in (size, packed, header):
            size, header = _sizes64(directory[at : at + extra_size], size, packed, header)
        found.append((header, size, crc32, name))
        at += extra_size + comment_size
    found.sort(reverse=True)
    entries = {}
    for header, size, crc32, name in found:
        entries[name] = Entry(name, header, size, crc32, end)
        end = header
    if at != len(directory) or len(entries) != count:
        raise ValueError("not as many records as it says")
    return entries


def _sizes64(extra: bytes, size: int, packed: int, header: int) -> tuple[int, int]:
    """Size and header place of a record whose 32-bit fields are full."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            numbers = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            size = next(numbers, -1) if size == _FULL32 else size
            packed = next(numbers, -1) if packed == _FULL32 else packed
            header = next(numbers, -1) if header == _FULL32 else header
            if min(size, packed, header) >= 0:
                return size, header
        at += 4 + length
    raise ValueError("no 64-bit sizes")


def unreadable(path: Path, error: OSError) -> DataError:
    """The operating system refuses."""
    return DataError(f"{path}: cannot be read ({error}). Check the disk and the file.")


def _damaged(path: Path, size: int, what: str) -> DataError:
    return DataError(
        f"{path}: found a torch.save file of {size:,} bytes that is cut off or damaged "
        f"({what}), expected a complete one. Copy or capture it again."
    )


def _no_zip(path: Path, size: int) -> DataError:
    """A file that was no ``torch.save`` file to begin with."""
    return DataError(
        f"{path}: found {size:,} bytes that are not a torch.save zip file, expected one. An older "
        "format can be converted: torch.save(torch.load(file, weights_only=True), file)."
    )
