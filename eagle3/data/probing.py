"""Probing the files of a directory, many at once, with results in the order of the files.

Probing is Python code between short reads, so threads help where a disk answers late (a cold disk,
a network) and do not where the files are in memory. Large directories are therefore dealt to
processes, each with a few threads; they are started as programs of their own
(:mod:`eagle3.data.probe_worker`), since a fork of a process with threads and a GPU is not safe and
a spawned one would import the main program again.
"""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

from eagle3.data.store import DocumentRecord, Store, attempt
from eagle3.errors import DataError

Result = Sequence[DocumentRecord] | DataError
"""Documents of a file, or what is wrong with it."""
_CHUNK_FILES = 64
_MANY_FILES = 4096
_MAX_PROCESSES = 8
_MIN_THREADS = 8


def probe_files(
    store: Store, files: Sequence[str], num_workers: int
) -> Generator[list[Result], None, None]:
    """Results of the files in their order, in runs of up to 64.

    Args:
        store: what the files belong to.
        files: names within its directory.
        num_workers: processes at most, for a directory of 4,096 files or more; 1 starts none.

    Raises:
        DataError: a process ended unasked.
    """
    chunks = [list(files[i : i + _CHUNK_FILES]) for i in range(0, len(files), _CHUNK_FILES)]
    processes = min(num_workers, _MAX_PROCESSES, len(os.sched_getaffinity(0)))
    if len(files) < _MANY_FILES or processes < 2:
        threads = max(num_workers, _MIN_THREADS)
        yield from _mapped(lambda chunk: [attempt(store, f) for f in chunk], chunks, threads)
        return
    with ExitStack() as stack:
        idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        for process in [stack.enter_context(_Process(store)) for _ in range(processes)]:
            idle.put(process)

        def ask(chunk: list[str]) -> list[Result]:
            process = idle.get()
            try:
                return process.ask(chunk)
            finally:
                idle.put(process)

        yield from _mapped(ask, chunks, processes)


def _mapped(
    work: Callable[[list[str]], list[Result]], chunks: list[list[str]], threads: int
) -> Generator[list[Result], None, None]:
    pool = ThreadPoolExecutor(threads, thread_name_prefix="eagle3-index")
    try:
        yield from pool.map(work, chunks)
    finally:
        pool.shutdown(cancel_futures=True)


class _Process:
    """One process that probes; ends with the context, or when this process is gone."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __enter__(self) -> _Process:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "eagle3.data.probe_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            process_group=0,  # an interrupt from the terminal ends it through us
        )
        with suppress(OSError):  # it has ended already; asking says so
            self._send(self._store)
        return self

    def __exit__(self, *_: object) -> None:
        child = self._child
        child.kill()  # nothing is lost: whoever wants a result has it by now
        child.wait()
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            with suppress(OSError):  # of what could not be sent any more
                pipe.close()

    def ask(self, files: list[str]) -> list[Result]:
        """The results of ``files``."""
        assert self._child.stdout is not None
        try:
            self._send(files)
            found: list[Result] = pickle.load(self._child.stdout)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise DataError(
                f"indexing: found that a process which reads files ended (exit code "
                f"{self._child.wait()}), expected it to go on. Is memory short? Start again; "
                "data.num_workers=1 indexes without processes."
            ) from error
        return found

    def _send(self, message: Any) -> None:
        assert self._child.stdin is not None
        pickle.dump(message, self._child.stdin, pickle.HIGHEST_PROTOCOL)
        self._child.stdin.flush()
