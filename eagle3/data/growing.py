"""Documents of a directory that a capture is still filling, in the order in which they arrive.

Rank 0 watches; what it decides is agreed on, so that all ranks see the same documents in the same
order, the same end and the same failure::

    rank 0                                        other ranks
    list, probe new files, decide                 wait
    agree([verdict, names]) -------------------> the same list
    hand out the documents                        probe these files, hand out the documents

A file counts once it is whole. Writers that rename whole files into place are seen at once;
another one's file is tried again for as long as it grows. The directory is complete when nothing
marks it as unfinished any more: captures of this package put ``.capture.json`` there first and
remove it last, and any other writer can do the same with an empty file.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eagle3.data import declaration, native
from eagle3.data.bad_samples import BadSamples
from eagle3.data.declaration import STARTED_NAME, StoredDeclaration
from eagle3.data.formats import has_documents, open_store
from eagle3.data.layout import LayoutError, StateLayout
from eagle3.data.store import DocumentRecord, Store
from eagle3.errors import DataError

logger = logging.getLogger(__name__)
_MOST_FILES = 512
"""Files of one batch, so that a directory with many shows signs of life and other ranks too."""
_MORE, _END, _FAILED = "more", "end", "failed: "
_HINT = "Whoever runs the capture knows how it counts layers and where it takes the last state."

Agree = Callable[[list[str]], list[str]]
"""Gives every rank the list that rank 0 passes; the others pass an empty one."""


@dataclass(frozen=True)
class Patience:
    """How long to wait for a directory that grows. All in seconds."""

    poll_s: float = 1.0
    """Between two looks at the directory."""
    stall_s: float = 30.0
    """A file that is not whole and did not change for so long counts as a bad sample."""
    timeout_s: float = 600.0
    """Nothing new for so long, while somebody waits, is an error."""


@dataclass(frozen=True)
class _Attempt:
    """A file that was not whole when it was looked at."""

    size: int
    modified_ns: int
    since: float
    """Monotonic time at which it was first seen so."""


@dataclass
class _Watch:
    """What rank 0 remembers between two looks."""

    seen: set[str] = field(default_factory=set)
    """Files that are done: handed out, or bad."""
    partial: dict[str, _Attempt] = field(default_factory=dict)
    found: dict[str, Sequence[DocumentRecord]] = field(default_factory=dict)
    """Documents of the files of the latest look."""
    last_sign: float = 0.0
    """Monotonic time at which something arrived or grew, or somebody began to wait."""


class GrowingDirectory:
    """Iterating gives the documents of files that became whole, batch after batch, until the end.

    Iterating raises:
        DataError: nothing arrives for too long, too many files are bad, or states of other sizes
            than :attr:`layout`.

    Args:
        directory: where files arrive; may be missing or empty at first.
        layout: sizes of the states.
        bad_samples: where rank 0 counts files that never became whole.
        arrow: as :func:`eagle3.data.formats.open_store`.
        patience: how long to wait.
        rank: of this process; 0 watches.
        agree: how ranks learn what rank 0 found. Called in the thread that iterates, equally often
            on every rank.
    """

    def __init__(
        self,
        directory: Path,
        layout: StateLayout,
        bad_samples: BadSamples,
        *,
        arrow: Path | None = None,
        patience: Patience | None = None,
        rank: int = 0,
        agree: Agree = lambda names: names,
    ) -> None:
        self.directory = directory
        self.layout = layout
        self.documents = 0
        """Handed out so far."""
        self._bad_samples = bad_samples
        self._arrow = arrow
        self._patience = patience or Patience()
        self._rank = rank
        self._agree = agree
        self._dtype = ""

    @property
    def store(self) -> Store:
        """The directory as it is now; open it after something arrived."""
        return open_store(self.directory, self.layout, self._arrow)

    def declaration(self) -> StoredDeclaration:
        """What the directory says about its states, complete or not.

        Raises:
            DataError: as :meth:`eagle3.data.store.Store.declaration`.
        """
        if not declaration.is_unfinished(self.directory):
            return self.store.declaration()
        found = declaration.read_unfinished_declaration(self.directory, self.layout.num_aux_layers)
        return StoredDeclaration(found.declaration, found.writer, _HINT, found.file)

    def __iter__(self) -> Iterator[list[DocumentRecord]]:
        watch, verdict = _Watch(), _MORE
        while verdict != _END:
            watch.last_sign = time.monotonic()
            names: list[str] = []
            while not names and verdict != _END:
                verdict, *names = self._agree(self._look(watch) if self._rank == 0 else [])
                if verdict.startswith(_FAILED):
                    raise DataError(verdict.removeprefix(_FAILED))
                if self._rank == 0 and not names and verdict != _END:
                    time.sleep(self._patience.poll_s)
            if self._rank == 0:
                records = [record for name in names for record in watch.found[name]]
            else:
                records = self._probe_agreed(names)
            self.documents += len(records)
            if records:
                yield records

    def _look(self, watch: _Watch) -> list[str]:
        """One look at the directory: a verdict, and the names of files that became whole."""
        # The mark is looked for first: what is listed after it is gone is all there will be.
        complete = not _is_unfinished(self.directory)
        watch.found.clear()
        try:
            if has_documents(self.directory):
                self._probe_new(self.store, watch)
        except DataError as error:
            return [f"{_FAILED}{error}"]
        watch.seen.update(watch.found)
        if watch.found:
            watch.last_sign = time.monotonic()
            return [_MORE, *watch.found]
        if complete and watch.seen and not watch.partial:
            return [_END]
        if time.monotonic() - watch.last_sign > self._patience.timeout_s:
            return [f"{_FAILED}{self._nothing_new(watch)}"]
        return [_MORE]

    def _probe_new(self, store: Store, watch: _Watch) -> None:
        """Probe files that are not done, oldest first; a document's file is complete by its end."""
        arrived = []
        for place, name in enumerate(store.files):
            if name not in watch.seen:
                try:
                    stat = (self.directory / name).stat()
                except FileNotFoundError:  # renamed or removed since it was listed
                    watch.partial.pop(name, None)
                    continue
                arrived.append((stat.st_mtime_ns, place, name, stat.st_size))
        for modified_ns, _, name, size in sorted(arrived)[:_MOST_FILES]:
            try:
                watch.found[name] = self._checked(store.probe(name), name)
                watch.partial.pop(name, None)
            except DataError as error:
                if isinstance(error, LayoutError) and not self._dtype:
                    raise
                if self._has_stalled(watch, name, size, modified_ns):
                    self._bad_samples.add(str(self.directory / name), str(error))
                    logger.warning("skipped: %s", error)
                    watch.seen.add(name)
                    del watch.partial[name]

    def _has_stalled(self, watch: _Watch, name: str, size: int, modified_ns: int) -> bool:
        now, before = time.monotonic(), watch.partial.get(name)
        if before is None or (before.size, before.modified_ns) != (size, modified_ns):
            watch.partial[name] = _Attempt(size, modified_ns, now)
            watch.last_sign = now
            return False
        return now - before.since >= self._patience.stall_s

    def _checked(self, records: Sequence[DocumentRecord], name: str) -> Sequence[DocumentRecord]:
        """All documents of a run have states of one dtype."""
        for record in records:
            self._dtype = self._dtype or record.dtype
            if record.dtype != self._dtype:
                raise DataError(
                    f"{self.directory / name}: key 'hidden_states': found {record.dtype}, expected "
                    f"{self._dtype} as in the files before it. Capture the sample again."
                )
        return records

    def _probe_agreed(self, names: list[str]) -> list[DocumentRecord]:
        """Documents of files that rank 0 saw whole; a shared disk may show them later here."""
        records: list[DocumentRecord] = []
        left, deadline = names[::-1], time.monotonic() + self._patience.stall_s
        while left:
            try:
                store = self.store
                while left:
                    records += store.probe(left[-1])
                    left.pop()
            except DataError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(self._patience.poll_s)
        return records

    def _nothing_new(self, watch: _Watch) -> str:
        mark = "" if _is_unfinished(self.directory) else " (no writer has begun)"
        partial = f", {len(watch.partial)} files not whole yet" if watch.partial else ""
        return (
            f"{self.directory}: found nothing new for {self._patience.timeout_s:g} s, "
            f"{self.documents:,} documents so far{partial}; expected the capture to go on{mark}. "
            "Look whether it still runs and has room on the disk, and start it again: it goes on "
            f"where it stopped. If all documents are there, remove {STARTED_NAME}. A slower "
            "capture needs a higher data.arrival_timeout_s."
        )


def _is_unfinished(directory: Path) -> bool:
    return declaration.is_unfinished(directory) or native.is_unfinished(directory)
