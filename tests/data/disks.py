"""Byte readers that behave as disks may: slow, stuck, broken; the reading itself is real."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from eagle3.data.byte_reader import BufferedReader, ByteReader, Bytes, IndexedFile
from eagle3.names import ReadMode

Before = Callable[[IndexedFile, int, int], None]


class Disk:
    """Calls ``before(file, offset, count)`` before every read."""

    def __init__(self, before: Before, reader: ByteReader | None = None) -> None:
        self._before = before
        self._reader = reader or BufferedReader()
        self.mode: ReadMode = self._reader.mode

    def read(self, file: IndexedFile, offset: int, count: int) -> Bytes:
        self._before(file, offset, count)
        return self._reader.read(file, offset, count)

    def read_into(self, file: IndexedFile, offset: int, out: Bytes) -> None:
        self._before(file, offset, len(out))
        self._reader.read_into(file, offset, out)


class Log:
    """Notes every read, as ``(file name, offset, count)``."""

    def __init__(self) -> None:
        self.reads: list[tuple[str, int, int]] = []

    def __call__(self, file: IndexedFile, offset: int, count: int) -> None:
        self.reads.append((file.path.name, offset, count))

    @property
    def files(self) -> set[str]:
        """Names of the files that were read."""
        return {name for name, _, _ in self.reads}


class Stuck:
    """Does not answer until it is released."""

    def __init__(self) -> None:
        self.reached, self.released = threading.Event(), threading.Event()

    def __call__(self, file: IndexedFile, offset: int, count: int) -> None:
        self.reached.set()
        self.released.wait()


def slow(seconds: float) -> Before:
    """Every read takes so long at least."""
    return lambda file, offset, count: time.sleep(seconds)
