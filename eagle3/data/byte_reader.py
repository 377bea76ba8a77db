"""Ranges of bytes of files, through the page cache or past it.

``buffered``: ``pread``. The system reads ahead and keeps what it read, which pays when all the data
fit into memory: from the second epoch on nothing is read from the disk. When they cannot stay,
the pages are dropped behind the reader, so that they push nothing else out.

``direct``: ``O_DIRECT``. The disk writes into our memory, nothing is copied or kept, and it takes a
fraction of the processor time. Disk and memory want whole pages, so the pages around the range are
read into a buffer of the thread::

    file      |....|..xx|xxxx|xxx.|....|       x wanted
    read           |..xx|xxxx|xxx.|            returned: a view of the x

Where file and target begin and end with a block of the disk, as rows of most native directories
do, the disk writes straight into the target. A file system that refuses direct reads, as some in
memory do, is read buffered.

Every file is compared with its size at indexing: places in a file of another size mean nothing.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from eagle3.data.buffers import huge_pages
from eagle3.data.plain_file import READ
from eagle3.errors import DataError
from eagle3.names import ReadMode

logger = logging.getLogger(__name__)
_PAGE = 4096
_BLOCK = 512
_REFUSED = {errno.EINVAL, errno.EOPNOTSUPP}
_NOT_STRAIGHT = _REFUSED | {errno.EFAULT}
"""The disk has larger blocks, or the memory belongs to a device."""
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class IndexedFile:
    """A file as it was when it was indexed."""

    path: Path
    size: int
    """Bytes; -1: it could not be looked at, and reading it will say why."""

    @classmethod
    def at(cls, path: Path) -> IndexedFile:
        """The file as it is now."""
        try:
            return cls(path, path.stat().st_size)
        except OSError:
            return cls(path, -1)


class ByteReader(Protocol):
    """Reads ranges. Safe to use from several threads; every method raises DataError when the file
    cannot be read or has another size than when it was indexed.
    """

    mode: ReadMode

    def read(self, file: IndexedFile, offset: int, count: int) -> Bytes:
        """[count] bytes, valid until the next read of the same thread."""

    def read_into(self, file: IndexedFile, offset: int, out: Bytes) -> None:
        """Fill ``out``, which is contiguous."""


class PageCache(StrEnum):
    """What happens to pages behind the reader."""

    keep = "keep"
    drop = "drop"


class BufferedReader:
    """Reads through the page cache."""

    mode = ReadMode.buffered

    def __init__(self, behind: PageCache = PageCache.keep) -> None:
        self._behind = behind
        self._staging = _Staging()

    def read(self, file: IndexedFile, offset: int, count: int) -> Bytes:
        """See :meth:`ByteReader.read`."""
        out = self._staging.take(count)
        self.read_into(file, offset, out)
        return out

    def read_into(self, file: IndexedFile, offset: int, out: Bytes) -> None:
        """See :meth:`ByteReader.read_into`."""
        try:
            with _Open(file) as opened:
                opened.fill(out, offset, len(out), step=1)
                if self._behind is PageCache.drop:
                    os.posix_fadvise(opened.descriptor, offset, len(out), os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise _unreadable(file, error) from error


class DirectReader:
    """Reads past the page cache; buffered on file systems that refuse that."""

    mode = ReadMode.direct

    def __init__(self, behind: PageCache = PageCache.keep) -> None:
        """``behind`` is for the file systems that refuse."""
        self._buffered = BufferedReader(behind)
        self._staging = _Staging()
        self._refusing: set[int] = set()
        self._straight = True
        self._lock = threading.Lock()

    @property
    def refused(self) -> bool:
        """Some file system refused."""
        return bool(self._refusing)

    def read(self, file: IndexedFile, offset: int, count: int) -> Bytes:
        """See :meth:`ByteReader.read`."""
        try:
            if self._refusing and _device(file) in self._refusing:
                return self._buffered.read(file, offset, count)
            first = offset // _PAGE * _PAGE
            stop = -(-(offset + count) // _PAGE) * _PAGE
            pages = self._staging.take(stop - first)
            with _Open(file, os.O_DIRECT) as opened:
                opened.fill(pages, first, offset + count - first, step=_PAGE)
            return pages[offset - first : offset - first + count]
        except OSError as error:
            if error.errno not in _REFUSED:
                raise _unreadable(file, error) from error
            self._note_refusal(file, error)
            return self._buffered.read(file, offset, count)

    def read_into(self, file: IndexedFile, offset: int, out: Bytes) -> None:
        """See :meth:`ByteReader.read_into`."""
        aligned = (offset | out.ctypes.data | len(out)) % _BLOCK == 0
        if not (aligned and self._straight and self._read_straight(file, offset, out)):
            np.copyto(out, self.read(file, offset, len(out)))

    def _read_straight(self, file: IndexedFile, offset: int, out: Bytes) -> bool:
        """Whether it could be done."""
        try:
            with _Open(file, os.O_DIRECT) as opened:
                opened.fill(out, offset, len(out), step=_BLOCK)
        except OSError as error:
            if error.errno not in _NOT_STRAIGHT:
                raise _unreadable(file, error) from error
            self._straight = False
        return self._straight

    def _note_refusal(self, file: IndexedFile, error: OSError) -> None:
        with self._lock:
            device = _device(file)
            if device in self._refusing:
                return
            self._refusing.add(device)
        logger.warning(
            "%s: its file system refuses direct reads (%s): buffered reads instead. "
            "data.read_mode=buffered asks for them",
            file.path.parent,
            error.strerror,
        )


class _Staging(threading.local):
    """A buffer of each thread, as large as its largest read."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def take(self, size: int) -> Bytes:
        if len(self._memory) < size:
            self._memory = huge_pages(size)
        return self._memory[:size]


class _Open:
    """An open file of the right size. A context manager; OSError where the system refuses."""

    def __init__(self, file: IndexedFile, flags: int = 0) -> None:
        self._file = file
        self.descriptor = os.open(file.path, READ | flags)

    def __enter__(self) -> _Open:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def fill(self, out: Bytes, offset: int, needed: int, step: int) -> None:
        """Read ``len(out)`` bytes from ``offset``, of which ``needed`` must be there.

        A read that was cut short goes on at the last multiple of ``step``.
        """
        self._check_size()
        view = out.data
        done = 0
        while done < needed:
            start = done // step * step
            found = start + os.preadv(self.descriptor, [view[start:]], offset + start)
            if found <= done:
                raise DataError(
                    f"{self._file.path}: found its end at byte {offset + done:,}, expected "
                    f"{offset + needed:,} bytes or more: it was cut after it was indexed. "
                    "Copy or capture it again."
                )
            done = found

    def _check_size(self) -> None:
        found, expected = os.fstat(self.descriptor).st_size, self._file.size
        if found != expected and expected >= 0:
            raise DataError(
                f"{self._file.path}: found {found:,} bytes, expected {expected:,} as when it was "
                "indexed: it was cut or replaced since. Start again, so that it is indexed anew; "
                "if that does not help, copy or capture it again."
            )


def _device(file: IndexedFile) -> int:
    return file.path.stat().st_dev


def _unreadable(file: IndexedFile, error: OSError) -> DataError:
    return DataError(f"{file.path}: cannot be read ({error}). Check the disk and the file.")
