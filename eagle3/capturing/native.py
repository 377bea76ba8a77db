"""States into a native directory, from writer threads, so that neither waits for the other.

::

    this thread       batch -> states -> copies on the CPU ---.  at most `_WAITING` documents wait,
    writer threads    a copy -> its place in the shard <------'  then the verifier waits too
    one more          a filled shard: synced, read back, compared, renamed

Killed at any point and started again, it goes on (:mod:`eagle3.data.native_writer`) and ends with
the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import pairwise
from threading import BoundedSemaphore

import torch
from torch import Tensor

from eagle3.capture_progress import Progress
from eagle3.capturing.batches import shard_groups
from eagle3.capturing.documents import Document
from eagle3.capturing.streams import Captured
from eagle3.data.bad_samples import BadSamples
from eagle3.data.disk import check_space, free_bytes, size
from eagle3.data.native_shard import token_bytes
from eagle3.data.native_shard_writer import ShardWriter
from eagle3.data.native_writer import NativeWriter
from eagle3.verifier.base import CapturedStates

_WAITING = 4
"""Documents per writer thread that wait to be written: the bound on memory."""

Stream = Callable[[Sequence[Document], Sequence[int]], Iterator[Captured]]
"""States of the documents at some places among others; see
:func:`eagle3.capturing.streams.states_of`."""


@dataclass(frozen=True)
class FillSettings:
    """How a directory is filled."""

    batch_tokens: int
    num_writers: int
    log: Callable[[str], None]


class Filler:
    """Fills all shards of a writer, group after group."""

    def __init__(
        self,
        writer: NativeWriter,
        documents: Sequence[Document],
        stream: Stream,
        failed: BadSamples,
        settings: FillSettings,
    ) -> None:
        """``failed`` counts documents without states, and stops when there are too many."""
        self._writer, self._documents, self._stream = writer, documents, stream
        self._failed, self._settings = failed, settings
        self._dtype: torch.dtype = getattr(torch, writer.facts.dtype)
        self._writers = ThreadPoolExecutor(settings.num_writers, "eagle3-capture")
        self._finisher = ThreadPoolExecutor(1, "eagle3-finish")
        self._room = BoundedSemaphore(_WAITING * settings.num_writers)

    def run(self) -> None:
        """Write everything that is missing.

        Raises:
            DataError: the disk is full or refuses, or too many documents fail.
            VerifierError: the verifier gives nothing.
        """
        finishing: list[Future[None]] = []
        try:
            self._account_for_skipped()
            progress, borders = self._progress(), self._writer.borders
            members = [range(*ends) for ends in pairwise(borders)]
            tokens = [sum(len(self._documents[d].ids) for d in own) for own in members]
            for group in shard_groups(tokens, self._settings.batch_tokens):
                own = range(borders[group[0]], borders[group[-1] + 1])
                shards = self._fill(group, own, progress)
                for earlier in finishing:  # a faulty disk is told of before more is written
                    earlier.result()
                finishing = [self._finisher.submit(self._writer.finish, shard) for shard in shards]
            for last in finishing:
                last.result()
        finally:
            self._writers.shutdown(cancel_futures=True)
            self._finisher.shutdown(cancel_futures=True)

    def _account_for_skipped(self) -> None:
        for document, reason in self._writer.skipped.items():
            self._failed.add(self._name(document), reason)

    def _progress(self) -> Progress:
        facts, directory = self._writer.facts, self._writer.directory
        missing = self._writer.missing_bytes() // token_bytes(facts.layout, facts.dtype)
        return Progress(
            missing,
            self._settings.log,
            more=lambda: f", {size(free_bytes(directory))} of disk free",
        )

    def _fill(self, group: range, members: range, progress: Progress) -> list[ShardWriter]:
        """The shards of a group with all their documents, but for those that have none left."""
        filled: list[ShardWriter] = []
        open_numbers = list(group)
        while open_numbers:
            check_space(self._writer.directory, self._writer.missing_bytes())
            opened = [s for number in open_numbers if (s := self._writer.open(number)) is not None]
            try:
                reasons = self._write_all(opened, members, progress)
            except BaseException:
                for shard in (*opened, *filled):
                    shard.close(sync=False)
                raise
            open_numbers = []
            for shard in opened:
                if not shard.missing:
                    filled.append(shard)
                    continue
                # Without these documents the others have other places, so it is filled anew.
                shard.close(sync=False)
                for document in shard.missing:
                    self._writer.skip(document, reasons[document])
                open_numbers.append(shard.number)
                progress.extend(shard.layout.rows)
        return filled

    def _write_all(
        self, shards: Sequence[ShardWriter], members: range, progress: Progress
    ) -> dict[int, str]:
        """Write what is missing; documents without states and why, of which nothing is written."""
        home = {document: shard for shard in shards for document in shard.missing}
        wanted = [document - members.start for document in home]
        documents = self._documents[members.start : members.stop]
        reasons: dict[int, str] = {}
        pending: list[Future[None]] = []
        try:
            for place, states in self._stream(documents, wanted):
                document = members.start + place
                if isinstance(states, str):
                    reasons[document] = f"{self._name(document)}: {states}"
                    self._failed.add(self._name(document), reasons[document])
                else:
                    pending = [task for task in pending if not _ended(task)]
                    pending.append(self._submit(home[document], document, states))
                progress.add(len(documents[place].ids))
            for task in pending:
                task.result()
        finally:
            wait(pending)
        return reasons

    def _submit(self, shard: ShardWriter, document: int, states: CapturedStates) -> Future[None]:
        aux = torch.cat([self._on_cpu(state) for state in states.aux], dim=-1)
        last = self._on_cpu(states.last)
        self._room.acquire()
        return self._writers.submit(self._write, shard, document, aux, last)

    def _on_cpu(self, state: Tensor) -> Tensor:
        """A copy with a storage of its own: a view would keep the whole batch alive."""
        return state.to("cpu", self._dtype, copy=True)

    def _write(self, shard: ShardWriter, document: int, aux: Tensor, last: Tensor) -> None:
        try:
            out = shard.document(document)
            out.rows(aux, last)
            content = self._documents[document]
            out.close(torch.tensor(content.ids), torch.tensor(content.loss_mask).bool())
        finally:
            self._room.release()

    def _name(self, document: int) -> str:
        return self._documents[document].place or f"document {document}"


def _ended(task: Future[None]) -> bool:
    """Whether it has ended; raises its error, so that the first one stops the capture."""
    if not task.done():
        return False
    task.result()
    return True
