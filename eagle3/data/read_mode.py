"""Which way of reading a directory gets: by name, by its size, or measured on its own files."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from eagle3.data.byte_reader import (
    BufferedReader,
    ByteReader,
    DirectReader,
    IndexedFile,
    PageCache,
)
from eagle3.errors import DataError
from eagle3.names import ReadMode

logger = logging.getLogger(__name__)
_ROUNDS = 3
_ROUND_BYTES = 32 << 20
_CHUNK_BYTES = 4 << 20


class _Range(NamedTuple):
    file: IndexedFile
    offset: int
    size: int


def choose_reader(
    mode: ReadMode,
    files: Sequence[IndexedFile],
    num_threads: int,
    available_bytes: int | None = None,
) -> ByteReader:
    """The reader for ``files``.

    ``auto`` is buffered when they fit into half of the memory that is free, because they are then
    read from the disk once. Else it is the faster of both on parts of these files.

    Args:
        num_threads: As many as the loader will have.
        available_bytes: Free memory; None: ask the system.
    """
    available = available_memory() if available_bytes is None else available_bytes
    total = sum(max(file.size, 0) for file in files)
    fits = total <= available // 2
    behind = PageCache.keep if fits else PageCache.drop
    match mode:
        case ReadMode.buffered:
            return BufferedReader(behind)
        case ReadMode.direct:
            return DirectReader(behind)
    if fits:
        return BufferedReader(behind)
    return _faster(files, BufferedReader(behind), DirectReader(behind), num_threads)


def available_memory() -> int:
    """Bytes that programs can still take, in this container or on this machine."""
    with Path("/proc/meminfo").open() as lines:
        facts = dict(line.split(":", 1) for line in lines)
    available = int(facts["MemAvailable"].split()[0]) * 1024
    with contextlib.suppress(OSError, ValueError):  # no limit is the word "max"
        available = min(available, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return available


def _faster(
    files: Sequence[IndexedFile],
    buffered: BufferedReader,
    direct: DirectReader,
    num_threads: int,
) -> ByteReader:
    """Time both in turns, each on parts of its own, through all of ``files``."""
    readers: tuple[ByteReader, ...] = (direct, buffered)
    parts = _parts(files, len(readers) * _ROUNDS)
    seconds: dict[ReadMode, float] = {}
    read: dict[ReadMode, int] = {}
    with ThreadPoolExecutor(num_threads, thread_name_prefix="eagle3-measure") as pool:
        for turn, part in enumerate(parts):
            reader = readers[turn % len(readers)]
            _forget(part)
            started = time.perf_counter()
            count = sum(pool.map(lambda piece, reader=reader: _read(reader, piece), part))
            taken = time.perf_counter() - started
            seconds[reader.mode] = seconds.get(reader.mode, 0.0) + taken
            read[reader.mode] = read.get(reader.mode, 0) + count
    speed = {mode: read[mode] / seconds[mode] / 1e9 for mode in seconds}
    if direct.refused or not all(read.values()):
        return buffered
    chosen = max(readers, key=lambda reader: speed[reader.mode])
    logger.info(
        "%s: %s reads: measured direct %.2f GB/s, buffered %.2f GB/s with %d threads",
        files[0].path.parent,
        chosen.mode,
        speed[ReadMode.direct],
        speed[ReadMode.buffered],
        num_threads,
    )
    return chosen


def _parts(files: Sequence[IndexedFile], count: int) -> list[list[_Range]]:
    """``count`` runs of consecutive bytes, evenly spread over the files, in chunks."""
    ends = np.cumsum([max(file.size, 0) for file in files])
    total = int(ends[-1])
    size = min(_ROUND_BYTES, total // count)
    parts = []
    for place in (total * number // count for number in range(count)):
        part, stop = [], place + size
        while place < stop:
            number = int(np.searchsorted(ends, place, side="right"))
            offset = place - int(ends[number]) + files[number].size
            step = min(_CHUNK_BYTES, stop - place, files[number].size - offset)
            part.append(_Range(files[number], offset, step))
            place += step
        parts.append(part)
    return parts


def _forget(part: Sequence[_Range]) -> None:
    """Take the part out of the page cache, where an earlier run may have left it."""
    for piece in part:
        with contextlib.suppress(OSError):  # reading it will say so
            descriptor = os.open(piece.file.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(descriptor, piece.offset, piece.size, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _read(reader: ByteReader, piece: _Range) -> int:
    """Bytes read; a bad file counts nothing here, and is named when it is needed."""
    with contextlib.suppress(DataError):
        return len(reader.read(piece.file, piece.offset, piece.size))
    return 0
