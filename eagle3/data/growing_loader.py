"""Optimizer windows of one rank from a directory that a capture is still filling.

Documents are packed in groups, in the order in which they arrive, each document once::

    arrival     d0 d1 d2 d3 | d4 d5 d6 | d7 d8         a group ends with the document that brings
    group       0             1          2             it to ``group_rows`` rows, or with the last
    steps       0  1  2       3  4       5             a group's last step may be partial

Where a group ends depends on the order of arrival alone, not on when somebody looked. A group is
planned as an epoch is, so the ranks get disjoint parts of it and as many steps each.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace

import numpy as np

from eagle3.data.bad_samples import BadSamples
from eagle3.data.batch import Window
from eagle3.data.corpus import Corpus, check_same_states
from eagle3.data.declaration import resolve_declaration
from eagle3.data.growing import GrowingDirectory
from eagle3.data.index import index_records
from eagle3.data.loader import PackReader, WindowLoader
from eagle3.data.packing import segment_documents
from eagle3.data.plan import training_plan
from eagle3.data.reading import StateReader
from eagle3.data.settings import DataSettings
from eagle3.data.shards import Shards
from eagle3.data.sources import apply_labels, read_labels
from eagle3.data.store import DocumentRecord
from eagle3.errors import DataError
from eagle3.names import ReadMode

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GrowingLoader:
    """The windows of one rank; how many there will be is not known. To be iterated once.

    Iterating raises :class:`DataError` as :class:`GrowingDirectory` and
    :class:`eagle3.data.loader.WindowLoader` do, and when the directory ends without anything to
    train on.
    """

    source: GrowingDirectory
    settings: DataSettings
    bad_samples: BadSamples
    group_rows: int
    """Rows of a group, at least, over all ranks."""
    leave_out: Callable[[DocumentRecord], bool]
    """Documents that are not trained: by ``prompt_hash`` those that validate."""
    same_as: Shards | None = None
    """A directory of the same kind of states; None: not compared."""
    max_steps: int | None = None
    """Windows at most; None: as many as there are."""

    def __iter__(self) -> Iterator[Window]:
        step, waiting_since = 0, time.perf_counter()
        for group, records in enumerate(self._groups()):
            with contextlib.closing(self._windows(records, group)) as windows:
                for window in windows:
                    waited = time.perf_counter() - waiting_since
                    yield replace(window, step=step, wait_s=waited)
                    step, waiting_since = step + 1, time.perf_counter()
                    if step == self.max_steps:
                        return
        if not step:
            raise DataError(
                f"{self.source.directory}: found {self.source.documents:,} documents and no "
                "supervised row to train on, expected some. Look at the loss masks of the capture, "
                "at data.train_on and at the prompts that validate."
            )
        at_most = f" of at most {self.max_steps:,}" if self.max_steps is not None else ""
        logger.info(
            "%s: complete, all that arrived is trained in %s optimizer steps%s",
            self.source.directory,
            f"{step:,}",
            at_most,
        )

    def _groups(self) -> Iterator[list[DocumentRecord]]:
        group: list[DocumentRecord] = []
        rows = left_out = 0
        for batch in self.source:
            for record in batch:
                if record.length < 2 or self.leave_out(record):
                    left_out += 1
                    continue
                group.append(record)
                rows += record.length - 1
                if rows >= self.group_rows:
                    yield group
                    group, rows = [], 0
        logger.info(
            "%s: %s documents arrived, %s of them left out (their prompt validates, or less than "
            "two tokens)",
            self.source.directory,
            f"{self.source.documents:,}",
            f"{left_out:,}",
        )
        if group:
            yield group

    def _windows(self, records: list[DocumentRecord], group: int) -> Generator[Window, None, None]:
        settings, corpus = self.settings, self._corpus(records)
        cut = segment_documents(np.arange(len(corpus)), corpus.lengths, corpus.gates, settings.rule)
        if not cut.segments:
            return
        plan = training_plan(
            cut.segments,
            settings.max_seq_len,
            settings.seed,
            group,
            settings.world_size,
            settings.accumulate,
        )
        yield from WindowLoader(
            plan=plan,
            reader=PackReader(corpus, settings.pin_memory),
            bad_samples=self.bad_samples,
            max_seq_len=settings.max_seq_len,
            rank=settings.rank,
            epoch=group,
            num_workers=settings.num_workers,
            prefetch_windows=settings.prefetch_windows,
        )

    def _corpus(self, records: list[DocumentRecord]) -> Corpus:
        settings, source = self.settings, self.source
        store, index = source.store, index_records(records)
        declared = resolve_declaration(
            settings.declaration,
            source.declaration(),
            settings.layout.num_aux_layers,
            source.directory,
        )
        labels = read_labels(source.directory, settings.source_labels)
        sources, place = apply_labels(index, source.directory, labels)
        runs = index.runs.train_on(settings.train_on, index.lengths)
        # What has just been written is in memory, so there is nothing to measure for auto.
        direct = settings.read_mode is ReadMode.direct
        mode = ReadMode.direct if direct else ReadMode.buffered
        reader = StateReader.open(store, index, mode, settings.num_workers)
        shards = Shards(reader, declared, index, runs, sources, place)
        if self.same_as is not None:
            check_same_states(self.same_as, shards)
        return Corpus.join([shards])
