"""Optimizer windows of one rank, read ahead by threads.

Threads, not processes: reading a mapped file releases the interpreter lock, and nothing has to be
pickled or copied between processes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from eagle3.data.bad_samples import BadSamples
from eagle3.data.batch import PackedBatch, Window
from eagle3.data.collate import StatePlanes, collate
from eagle3.data.formats import Sample, SpeculatorsV1
from eagle3.data.index import DocumentIndex
from eagle3.data.masks import apply_train_on
from eagle3.data.packing import Pack, Segment
from eagle3.data.plan import EpochPlan
from eagle3.errors import DataError
from eagle3.names import TrainOn


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

    shards: SpeculatorsV1
    index: DocumentIndex
    train_on: TrainOn
    pin_memory: bool = False

    def load(self, pack: Pack, max_seq_len: int, epoch: int, place: int) -> LoadedPack:
        """Read and collate ``pack``; a bad sample is left out, and the rest moves up."""
        segments: list[Segment] = []
        samples: list[Sample] = []
        bad: dict[str, str] = {}
        for segment in pack:
            try:
                sample = self.read(segment)
            except DataError as error:
                bad[self.path(segment.document)] = str(error)
            else:
                segments.append(segment)
                samples.append(sample)
        batch = collate(segments, samples, max_seq_len, epoch, place, self._planes())
        return LoadedPack(batch, tuple(bad.items()), sum(_state_bytes(s) for s in samples))

    def read(self, segment: Segment) -> Sample:
        """The document of ``segment`` with the states of its rows.

        Raises:
            DataError: the file is bad, or is not the one that was indexed.
        """
        name = self.index.names[segment.document]
        sample = self.shards.read(name, segment.start, segment.stop + 1)
        length = int(self.index.lengths[segment.document])
        if len(sample) != length or sample.last_hidden.dtype != self.index.dtype:
            raise DataError(
                f"{self.shards.directory / name}: found {len(sample)} tokens in "
                f"{sample.last_hidden.dtype}, expected {length} in {self.index.dtype} as indexed: "
                "the file was replaced. Start again; if that does not help, delete paths.cache."
            )
        return replace(sample, loss_mask=apply_train_on(sample.loss_mask, self.train_on))

    def path(self, document: int) -> str:
        """Path of a document."""
        return str(self.shards.directory / self.index.names[document])

    def _planes(self) -> StatePlanes:
        layout = self.shards.layout
        return StatePlanes(
            aux_width=layout.num_aux_layers * layout.hidden_size,
            hidden_size=layout.hidden_size,
            dtype=self.index.dtype,
            pin_memory=self.pin_memory,
        )


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
    """Reader threads."""
    prefetch_windows: int
    """Windows read while another one is trained."""

    def __len__(self) -> int:
        return self.plan.steps

    def __iter__(self) -> Iterator[Window]:
        pending: deque[list[Future[LoadedPack]]] = deque()
        pool = ThreadPoolExecutor(self.num_workers, thread_name_prefix="eagle3-reader")
        submitted = 0
        try:
            for step in range(len(self)):
                while submitted < min(step + self.prefetch_windows + 1, len(self)):
                    pending.append(self._submit(pool, submitted))
                    submitted += 1
                # No local name keeps the window: its memory goes with its last user.
                yield self._receive(step, pending.popleft())
        finally:
            pool.shutdown(cancel_futures=True)

    def _submit(self, pool: ThreadPoolExecutor, step: int) -> list[Future[LoadedPack]]:
        return [
            pool.submit(
                self.reader.load,
                pack,
                self.max_seq_len,
                self.epoch,
                self.plan.place(step, self.rank, slot),
            )
            for slot, pack in enumerate(self.plan.rank_window(step, self.rank))
        ]

    def _receive(self, step: int, futures: list[Future[LoadedPack]]) -> Window:
        started = time.perf_counter()
        loaded = [future.result() for future in futures]
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


def _state_bytes(sample: Sample) -> int:
    return sum(block.nbytes for block in (*sample.aux_hidden, sample.last_hidden))
