"""One pass over a file that compares checksums and looks for NaN and inf on the way.

A file is seen as disjoint parts in ascending order, with gaps between them::

    bytes    0 .. 4096   4096 .. 9000   9000 .. 9400
             gap         states, CRC    ids, CRC
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import torch

from eagle3.data.plain_file import open_plain

CHUNK_BYTES = 8 << 20
_LEAST_BYTES = 64 << 10


class Fault(StrEnum):
    """What is wrong with a part."""

    cut = "the file ends before it"
    checksum = "other bytes than its checksum says"
    not_finite = "NaN or inf"


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes ``[start, stop)`` of a file."""

    start: int
    stop: int
    crc32: int | None = None
    """Of these bytes; None: not known."""
    states: tuple[tuple[int, int], ...] = ()
    """Bytes of the file, within the part, that are states; disjoint ranges, ascending."""
    dtype: torch.dtype = torch.bfloat16
    """Of the states."""


class Digest(Protocol):
    """A hash of :mod:`hashlib`."""

    def update(self, content: memoryview, /) -> None:
        """Take more bytes."""


def scan(
    path: Path,
    parts: Sequence[Part],
    *,
    digest: Digest | None = None,
    count: Callable[[int], None] = lambda _: None,
) -> list[Fault | None]:
    """Read the parts of a file, and all of it where there is a ``digest``.

    Args:
        path: The file.
        parts: Disjoint, ascending.
        digest: Takes every byte of the file, in order.
        count: Told the number of bytes after each read.

    Returns:
        The fault of each part; None: as it should be.

    Raises:
        OSError: the file cannot be read.
    """
    with _Stream(path, digest, count) as stream:
        found = [_check(stream, part) for part in parts]
        if digest is not None:
            stream.skip_to(None)
    return found


def is_finite(states: torch.Tensor) -> bool:
    """No NaN and no inf; NaN runs through minimum and maximum."""
    return not states.numel() or all(bool(torch.isfinite(x)) for x in torch.aminmax(states))


def _check(stream: _Stream, part: Part) -> Fault | None:
    crc, finite = 0, True
    place = part.start
    for first, stop in (*part.states, (part.stop, part.stop)):
        for content in stream.take(place, first, 1):
            crc = zlib.crc32(content, crc)
        for content in stream.take(first, stop, part.dtype.itemsize):
            crc = zlib.crc32(content, crc)
            finite = finite and is_finite(torch.frombuffer(content, dtype=part.dtype))
        place = stop
    if stream.is_cut:
        return Fault.cut
    if part.crc32 is not None and crc != part.crc32:
        return Fault.checksum
    return None if finite else Fault.not_finite


class _Stream:
    """Reads a file once from front to back through one buffer."""

    def __init__(self, path: Path, digest: Digest | None, count: Callable[[int], None]) -> None:
        self._file = open_plain(path)
        self._digest, self._count = digest, count
        self._buffer = memoryview(bytearray(CHUNK_BYTES))
        self._low = self._high = 0
        """Bytes of the buffer that are not consumed yet."""
        self._place = 0
        """Byte of the file at ``_low``."""
        self.is_cut = False

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def take(self, start: int, stop: int, multiple: int) -> Iterator[memoryview]:
        """The bytes ``[start, stop)`` in pieces of a multiple of ``multiple`` bytes."""
        if start == stop:
            return
        self.skip_to(start)
        while self._place < stop and not self.is_cut:
            size = min(stop - self._place, self._high - self._low)
            size -= size % multiple
            if size:
                yield self._buffer[self._low : self._low + size]
                self._low += size
                self._place += size
            else:
                self._refill(stop)

    def skip_to(self, place: int | None) -> None:
        """Go on at a byte of the file, or at its end; a digest sees what lies between."""
        while not self.is_cut and (place is None or self._place < place):
            ready = self._high - self._low
            if place is not None and self._place + ready >= place:
                self._low += place - self._place
                self._place = place
                return
            self._place += ready
            self._low = self._high = 0
            if self._digest is None and place is not None:
                self._place = place
            else:
                self._refill(place)

    def _refill(self, stop: int | None) -> None:
        """Read on, to ``stop`` or a little further unless all of the file is read anyway."""
        rest = self._high - self._low
        room = len(self._buffer)
        if self._digest is None and stop is not None:
            room = min(max(stop - self._place, _LEAST_BYTES), room)
        self._buffer[:rest] = bytes(self._buffer[self._low : self._high])
        self._low, self._high = 0, rest
        found = os.preadv(self._file, [self._buffer[rest:room]], self._place + rest)
        self.is_cut = found == 0
        self._high += found
        self._count(found)
        if self._digest is not None:
            self._digest.update(self._buffer[rest : rest + found])
