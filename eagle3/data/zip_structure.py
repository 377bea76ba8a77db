"""Whether a ``torch.save`` file says everything twice alike, as other readers of it need.

Our own reader takes the places of records from the directory at the end of the file
(:mod:`eagle3.data.torch_zip`). Others also read the header before a record, the descriptor after
it, and every number of the directory's end::

    | header, name | data | descriptor | ... | directory | 64-bit end, its place | end |

Compared are signatures, names, flags, sizes, checksums, counts and places. Dates, versions and
padding are not: no reader needs them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from eagle3.data.torch_zip import Entry, TorchZip

_LOCAL = struct.Struct("<4s2xHH16xHH")
_CENTRAL = struct.Struct("<4s4xHH8xII4H2x2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ4x2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_HAS_DESCRIPTOR = 0x8
_IS_DIRECTORY = 0x10
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF


class _Central(NamedTuple):
    """A record in the directory."""

    name: bytes
    flags: int
    method: int


def check_structure(archive: TorchZip) -> None:
    """Compare what the file says about its records with what it says elsewhere.

    Raises:
        DataError: something is said in two ways.
    """
    entries = archive.entries
    start = max(entries.values(), key=lambda entry: entry.header).end
    rest = archive.read(start, archive.size - start)
    stop = start
    for size, record in _directory(archive, rest, len(entries)):
        stop += size
        _check_record(archive, entries[record.name.decode()], record)
    _check_end(archive, rest, start, stop)


def _directory(archive: TorchZip, rest: bytes, count: int) -> Iterator[tuple[int, _Central]]:
    """Bytes and content of each record in the directory."""
    at = 0
    for _ in range(count):
        fields = _CENTRAL.unpack_from(rest, at)
        _, flags, method, packed, size, name_size, extra_size, comment_size, *others = fields
        disk, attributes, _ = others
        name = rest[at + _CENTRAL.size : at + _CENTRAL.size + name_size]
        if packed != size or disk not in (0, _FULL16) or attributes & _IS_DIRECTORY:
            raise archive.damaged(f"its directory contradicts itself about {name.decode()}")
        total = _CENTRAL.size + name_size + extra_size + comment_size
        yield total, _Central(name, flags, method)
        at += total


def _check_record(archive: TorchZip, entry: Entry, record: _Central) -> None:
    start = archive.start(entry)
    header = archive.read(entry.header, _LOCAL.size + len(record.name))
    magic, flags, method, name_size, extra_size = _LOCAL.unpack_from(header)
    found = (magic, flags, method, name_size, header[_LOCAL.size :])
    expected = (b"PK\x03\x04", record.flags, record.method, len(record.name), record.name)
    if found != expected or entry.header + _LOCAL.size + name_size + extra_size != start:
        raise archive.damaged(f"the header of record {entry.name} is not what the directory says")
    if not record.flags & _HAS_DESCRIPTOR:
        return
    stop = start + entry.size
    descriptor = archive.read(stop, entry.end - stop).removeprefix(b"PK\x07\x08")
    kind = {12: "<III", 20: "<IQQ"}.get(len(descriptor))
    if kind is None or struct.unpack(kind, descriptor) != (entry.crc32, entry.size, entry.size):
        raise archive.damaged(f"what follows record {entry.name} is not what the directory says")


def _check_end(archive: TorchZip, rest: bytes, start: int, stop: int) -> None:
    """The last bytes; the directory lies from ``start`` to ``stop``."""
    count, tail = len(archive.entries), rest[stop - start :]
    damaged = archive.damaged("the end of its directory contradicts the directory")
    wide = len(tail) - _END.size == _END64.size + _LOCATOR.size
    if not wide and len(tail) != _END.size:
        raise damaged
    if wide:
        end = (b"PK\x06\x06", _END64.size - 12, 0, 0, count, count, stop - start, start)
        locator = (b"PK\x06\x07", 0, stop, 1)
        if _END64.unpack_from(tail) != end or _LOCATOR.unpack_from(tail, _END64.size) != locator:
            raise damaged
    found = _END.unpack_from(tail, len(tail) - _END.size)
    plain = (b"PK\x05\x06", 0, 0, count, count, stop - start, start, 0)
    full = (None, _FULL16, _FULL16, _FULL16, _FULL16, _FULL32, _FULL32, None)
    for value, expected, instead in zip(found, plain, full, strict=True):
        if value != expected and not (wide and value == instead):
            raise damaged
