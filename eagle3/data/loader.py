"""Optimizer windows of one rank, read ahead by threads.

A pack is laid out from the index alone, then read in pieces, and every thread takes the next piece
of the pack that is needed next::

    thread 1   lay 0  0 0 0 0 lay 2 1 1 1 ..      all threads work on one pack, so the first one
    thread 2   lay 1  0 0 0 0 0   1 1 1 1 ..      is there soon, and packs come in order
    training                  | 0       | 1       one pack is laid ahead, so that no thread waits
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

from eagle3.data.bad_samples import BadSamples
from eagle3.data.batch import PackedBatch, Window
from eagle3.data.buffers import BufferPool, HostMemory, PinnedMemory
from eagle3.data.collate import DocumentRows, StatePlanes, lay_ids, lay_rows, state_targets
from eagle3.data.corpus import Corpus
from eagle3.data.hashing import sample_id
from eagle3.data.packing import Pack, Segment
from eagle3.data.plan import EpochPlan
from eagle3.data.reader_threads import ReaderThreads
from eagle3.errors import DataError

_THREADS_PER_READ = 2
"""While one waits for the disk, the other may copy what it has read."""


@dataclass(frozen=True)
class LoadedPack:
    """A pack and what happened while reading it."""

    batch: PackedBatch
    bad: tuple[tuple[str, str], ...]
    """Path and reason of the samples that were left out."""
    read_bytes: int


@dataclass(frozen=True)
class PackReader:
    """Reads the documents of packs. Safe to use from several threads."""

    corpus: Corpus
    pin_memory: bool = False

    def memory(self) -> HostMemory:
        """New memory for packs."""
        return PinnedMemory() if self.pin_memory else BufferPool()

    def load(self, pack: Pack, max_seq_len: int, epoch: int, place: int) -> LoadedPack:
        """Read ``pack`` in this thread; a bad document is left out, and the rest moves up."""
        assembly = PackAssembly(self, pack, max_seq_len, epoch, place, self.memory(), nullcontext())
        while True:
            for task in assembly.tasks():
                task()
            loaded = assembly.result()
            if loaded is not None:
                return loaded


class PackAssembly:
    """A pack in the making: do all :meth:`tasks`, then ask for the :meth:`result`."""

    def __init__(
        self,
        reader: PackReader,
        pack: Pack,
        max_seq_len: int,
        epoch: int,
        place: int,
        memory: HostMemory,
        disk: AbstractContextManager[object],
    ) -> None:
        """``disk`` is held while the disk reads states."""
        corpus = reader.corpus
        self._disk = disk
        self._corpus, self._pack = corpus, pack
        self._max_seq_len, self._epoch, self._place = max_seq_len, epoch, place
        self._planes = StatePlanes(corpus.layout, corpus.dtype, memory)
        self._bad: dict[int, str] = {}
        self._failed: list[tuple[int, int, str]] = []
        self._batch: PackedBatch | None = None
        self._read_bytes: list[int] = []

    def tasks(self) -> list[Callable[[], None]]:
        """Lay the pack out; what is to be read into it, for any thread and in any order."""
        corpus = self._corpus
        segments = [segment for segment in self._pack if segment.document not in self._bad]
        rows = [
            DocumentRows(corpus.loss_mask(segment.document), corpus.label(segment.document))
            for segment in segments
        ]
        batch = lay_rows(segments, rows, self._max_seq_len, self._planes, self._epoch, self._place)
        self._batch, self._failed = batch, []
        reads: list[tuple[int, Callable[[], int]]] = []
        states: list[tuple[int, Callable[[], int]]] = []
        for at, segment, targets in state_targets(batch, segments, corpus.layout):
            reads.append((segment.document, partial(self._read_ids, batch, at, segment)))
            pieces = corpus.pieces(segment.document, targets)
            states += [(segment.document, partial(piece.read, self._disk)) for piece in pieces]
        reads += states
        self._read_bytes = [0] * len(reads)
        return [partial(self._do, number, *read) for number, read in enumerate(reads)]

    def result(self) -> LoadedPack | None:
        """The pack; None: documents were bad, do :meth:`tasks` again, which leaves them out.

        Bad documents are rare, so the others are simply read again.
        """
        assert self._batch is not None, "there were tasks"
        batch, self._batch = self._batch, None
        if self._failed:
            # The first task that fails gives the reason, whichever thread came first.
            for _, document, reason in sorted(self._failed):
                self._bad.setdefault(document, reason)
            return None
        order = dict.fromkeys(segment.document for segment in self._pack)
        bad = tuple((self._name(each), self._bad[each]) for each in order if each in self._bad)
        return LoadedPack(batch, bad, sum(self._read_bytes))

    def _do(self, number: int, document: int, read: Callable[[], int]) -> None:
        try:
            self._read_bytes[number] = read()
        except DataError as error:
            self._failed.append((number, document, str(error)))
        except BaseException as error:
            error.add_note(f"while reading {self._corpus.path(document)}")
            raise

    def _read_ids(self, batch: PackedBatch, at: int, segment: Segment) -> int:
        """Counts no bytes of states."""
        lay_ids(batch, at, segment, self._corpus.input_ids(segment.document))
        return 0

    def _name(self, document: int) -> str:
        return f"{self._corpus.path(document)} {sample_id(int(self._corpus.sample_hash[document]))}"


class _PackInFlight:
    """A pack that threads read; :meth:`wait` for it."""

    def __init__(self, threads: ReaderThreads, assembly: PackAssembly, number: int) -> None:
        self._threads, self._assembly, self._number = threads, assembly, number
        self._left = 0
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._outcome: LoadedPack | BaseException | None = None
        # Before the pieces of the pack before this one: laying out is quick, and no thread waits.
        threads.submit(2 * number - 1, partial(self._guard, self._begin))

    def wait(self) -> LoadedPack:
        """The pack, or what went wrong in a thread. Can be interrupted."""
        self._done.wait()
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome

    def _begin(self) -> None:
        tasks = self._assembly.tasks()
        self._left = len(tasks)
        for task in tasks:
            self._threads.submit(2 * self._number + 2, partial(self._guard, self._work, task))
        if not tasks:
            self._finish()

    def _work(self, task: Callable[[], None]) -> None:
        task()
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._finish()

    def _finish(self) -> None:
        loaded = self._assembly.result()
        if loaded is None:
            self._begin()
        else:
            self._outcome = loaded
            self._done.set()

    def _guard(self, act: Callable[..., None], *arguments: object) -> None:
        """A thread that dies would leave the training waiting for ever."""
        try:
            act(*arguments)
        except BaseException as error:
            self._outcome = error
            self._done.set()


@dataclass(frozen=True)
class WindowLoader:
    """The windows of one rank in one epoch; the same whatever the number of threads.

    Iterating raises :class:`DataError` once there are more bad samples than allowed.
    """

    plan: EpochPlan
    reader: PackReader
    bad_samples: BadSamples
    max_seq_len: int
    rank: int
    epoch: int
    num_workers: int
    """Reads that the disk does at the same time."""
    prefetch_windows: int
    """Windows read while another one is trained."""
    start_step: int = 0
    """Optimizer step to begin at, when those before were trained already."""

    def __len__(self) -> int:
        """Windows of the whole epoch."""
        return self.plan.steps

    def __iter__(self) -> Iterator[Window]:
        ready: list[Window] = []
        with ReaderThreads(_THREADS_PER_READ * self.num_workers) as threads:
            ahead = _ReadAhead(self, threads)
            ahead.request(self.start_step + self.prefetch_windows)
            for step in range(self.start_step, len(self)):
                ahead.request(step)
                ready.append(self._receive(step, ahead.take()))
                # Now, not earlier: the memory of the window before is free, or soon will be.
                ahead.request(step + self.prefetch_windows)
                # No local name keeps the window: its memory goes with its last user.
                yield ready.pop()

    def _receive(self, step: int, packs: list[_PackInFlight]) -> Window:
        started = time.perf_counter()
        loaded = [pack.wait() for pack in packs]
        wait_s = time.perf_counter() - started
        bad = dict(item for pack in loaded for item in pack.bad)
        for path, reason in bad.items():
            self.bad_samples.add(path, reason)
        return Window(
            packs=tuple(pack.batch for pack in loaded),
            step=step,
            bad_samples=tuple(bad.values()),
            wait_s=wait_s,
            read_bytes=sum(pack.read_bytes for pack in loaded),
        )


class _ReadAhead:
    """The windows that are being read, in order."""

    def __init__(self, loader: WindowLoader, threads: ReaderThreads) -> None:
        self._loader, self._threads = loader, threads
        self._memory = loader.reader.memory()
        self._disk = threading.BoundedSemaphore(loader.num_workers)
        self._windows: deque[list[_PackInFlight]] = deque()
        self._next = loader.start_step

    def request(self, last: int) -> None:
        """Have all windows up to ``last`` read."""
        while self._next <= min(last, len(self._loader) - 1):
            slots = range(self._loader.plan.accumulate)
            self._windows.append([self._read(self._next, slot) for slot in slots])
            self._next += 1

    def take(self) -> list[_PackInFlight]:
        """The packs of the first window."""
        return self._windows.popleft()

    def _read(self, step: int, slot: int) -> _PackInFlight:
        loader, plan = self._loader, self._loader.plan
        pack, place = plan.rank_window(step, loader.rank)[slot], plan.place(step, loader.rank, slot)
        assembly = PackAssembly(
            loader.reader, pack, loader.max_seq_len, loader.epoch, place, self._memory, self._disk
        )
        return _PackInFlight(self._threads, assembly, step * plan.accumulate + slot)
