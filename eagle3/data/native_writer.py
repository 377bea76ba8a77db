"""Writes a native directory: from several threads, in any order, and again after a crash.

The lengths of all documents are known before the first state is. So the shards are planned at
once, a shard file has its header and its final size from the start, and every row has its place::

    directory/.writing/journal             what is written, see native_journal
    directory/.writing/shard-00007...      a shard that is being filled
    directory/shard-00006...               a whole one: synced, read back, compared, renamed
    directory/index.npz, manifest.json     last; then .writing goes

A second writer of the same job goes on with what is there. Documents that turn out unusable are
left out of their shard; the borders of the shards do not move.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from eagle3.data.disk import check_space, publish, write_error, write_whole
from eagle3.data.native import WRITING_NAME, is_native
from eagle3.data.native_index import Documents, NativeIndex, fingerprint, first_rows
from eagle3.data.native_journal import Journal
from eagle3.data.native_manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    Manifest,
    ShardFacts,
    StateFacts,
    VerifierFacts,
    digest,
    manifest_text,
)
from eagle3.data.native_shard import ShardLayout, token_bytes
from eagle3.data.native_shard_writer import ShardWriter, has_shape
from eagle3.data.scan import scan
from eagle3.errors import DataError

SHARD_BYTES = 2_000_000_000


class NativeWriter:
    """Writes one directory. Use as a context manager; the module tells how.

    Raises:
        DataError: from every method: the disk is full or refuses, the directory holds something
            else, or bytes that were read back are not those that were written.
    """

    def __init__(
        self,
        directory: Path,
        facts: StateFacts,
        documents: Documents,
        job: str,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """Begin, or go on with what another writer of the same ``job`` left.

        Args:
            directory: Made if missing; empty, or with a part of this job.
            facts: What the states are.
            documents: All that will be written, at least one, in this order.
            job: Any name of this job and its input; another job is not continued.
            shard_bytes: A shard has about so many bytes, and at least one document.
        """
        assert len(documents), "there is something to write"
        self.directory, self.facts, self.documents = directory, facts, documents
        self._writing = directory / WRITING_NAME
        self._borders = _plan(documents.lengths, facts, shard_bytes)
        _check_empty(directory)
        if not self._writing.exists():  # before anything claims the directory for this job
            check_space(directory, self._bytes_of(documents.lengths))
        try:
            self._writing.mkdir(parents=True, exist_ok=True)
            self._journal = Journal(self._writing / "journal")
        except OSError as error:
            raise write_error(self._writing, error, self._bytes_of(documents.lengths)) from error
        try:
            self._check_job(job)
            check_space(directory, self.missing_bytes())
        except BaseException:
            self._journal.close()
            raise

    def __enter__(self) -> NativeWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.close()

    @property
    def num_shards(self) -> int:
        """Planned shards."""
        return len(self._borders) - 1

    @property
    def borders(self) -> tuple[int, ...]:
        """First document of each planned shard, and the number of documents."""
        return tuple(self._borders)

    @property
    def skipped(self) -> dict[int, str]:
        """Documents that are left out, and why."""
        return dict(self._journal.content.skipped)

    @property
    def num_written(self) -> int:
        """Documents that the journal lists."""
        return len(self._journal.content.samples)

    def missing_bytes(self) -> int:
        """Bytes of the documents that are not written yet."""
        missing = np.ones(len(self.documents), np.bool_)
        content = self._journal.content
        for done in (content.samples, content.skipped):
            missing[list(done)] = False
        return self._bytes_of(self.documents.lengths[missing])

    def open(self, number: int) -> ShardWriter | None:
        """A shard with what is missing in it; None: it is finished, or nothing is left for it."""
        members = self._members(number)
        if not len(members):
            return None
        final, temporary = self.directory / _name(number), self._writing / _name(number)
        layout = self._layout(members)
        try:
            if number in self._journal.content.finished and has_shape(final, layout):
                return None
            if final.exists():  # whole, but the process died before it was noted
                final.replace(temporary)
        except OSError as error:
            raise write_error(final, error, self.missing_bytes()) from error
        return ShardWriter(
            number,
            temporary,
            layout,
            members,
            self.documents.lengths[members],
            self._journal,
            self.missing_bytes,
        )

    def skip(self, document: int, reason: str) -> None:
        """Leave a document out; its shard has to be closed and opened again."""
        try:
            self._journal.skip(document, reason)
        except OSError as error:
            raise write_error(self._writing, error, self.missing_bytes()) from error

    def finish(self, shard: ShardWriter) -> None:
        """Sync a filled shard, compare what the disk gives back, and put it in its place."""
        assert not shard.missing, "every document of the shard is written"
        shard.close(sync=True)
        hashed = hashlib.blake2b(digest_size=32)
        parts = shard.parts(self._members(shard.number).tolist())
        try:
            wrong = sum(fault is not None for fault in scan(shard.path, parts, digest=hashed))
            if wrong:
                shard.path.unlink()
                raise DataError(
                    f"{shard.path}: found other bytes in {wrong} of {len(parts)} ranges than were "
                    "written, expected the same when they are read back: the disk or the memory "
                    "of this machine is faulty. Check both, then start the same command again."
                )
            publish(shard.path, self.directory / shard.path.name)
            self._journal.finish(shard.number, hashed.hexdigest())
        except OSError as error:
            raise shard.error(error) from error

    def publish(self, name: str, content: bytes) -> None:
        """Write another file of the directory, whole or not at all."""
        temporary = self._writing / name
        try:
            write_whole(temporary, content)
            publish(temporary, self.directory / name)
        except OSError as error:
            raise write_error(self.directory / name, error, len(content)) from error

    def complete(self, verifier: VerifierFacts, created_by: str) -> Manifest:
        """Write index and manifest, when every shard is finished; the last step."""
        shards, index = self._collect()
        content, documents = index.to_bytes(), index.documents
        manifest = Manifest(
            created_by=created_by,
            verifier=verifier,
            states=self.facts,
            num_samples=len(index),
            num_tokens=int(documents.lengths.sum()),
            num_supervised_tokens=int(documents.runs.totals().sum()),
            fingerprint=fingerprint(documents.sample_hash),
            shards=shards,
            index_blake2b=digest(content),
        )
        self.publish(INDEX_NAME, content)
        self.publish(MANIFEST_NAME, manifest_text(manifest).encode())
        remove_leftovers(self.directory)
        return manifest

    def _collect(self) -> tuple[tuple[ShardFacts, ...], NativeIndex]:
        """What the shards hold, in their order."""
        content = self._journal.content
        numbers = [n for n in range(self.num_shards) if len(self._members(n))]
        members = [self._members(number) for number in numbers]
        if not numbers:
            raise DataError(
                f"{self.directory}: found no usable document among {len(self.documents)}, expected "
                "at least one. Capture the samples again."
            )
        shards = []
        for number, own in zip(numbers, members, strict=True):
            layout, blake2b = self._layout(own), content.finished[number]
            shards.append(
                ShardFacts(_name(number), layout.num_bytes, len(own), layout.rows, blake2b)
            )
        written = np.concatenate(members)
        documents = self.documents.take(written)
        shard = np.repeat(np.arange(len(members)), [len(m) for m in members])
        crc32 = np.array([content.samples[d] for d in written.tolist()], np.uint32)
        return tuple(shards), NativeIndex(documents, shard, first_rows(documents, shard), crc32)

    def _members(self, number: int) -> NDArray[np.int64]:
        """Documents of a shard, without those that are left out."""
        skipped = self._journal.content.skipped
        all_of_it = range(int(self._borders[number]), int(self._borders[number + 1]))
        return np.array([d for d in all_of_it if d not in skipped], np.int64)

    def _layout(self, members: NDArray[np.int64]) -> ShardLayout:
        rows = int(self.documents.lengths[members].sum())
        return ShardLayout(self.facts.layout, self.facts.dtype, rows)

    def _bytes_of(self, lengths: NDArray[np.int64]) -> int:
        return int(lengths.sum()) * token_bytes(self.facts.layout, self.facts.dtype)

    def _check_job(self, job: str) -> None:
        found = self._journal.content.job
        if found is None:
            self._journal.start(job)
        elif found != job:
            raise DataError(
                f"{self.directory}: found the beginning of another job ({found}), expected "
                f"nothing, or a part of this one ({job}). Choose another directory, or remove "
                "this one if it is not needed."
            )


def remove_leftovers(directory: Path) -> None:
    """Clean up behind a writer that has completed ``directory``, or died in its last breath."""
    shutil.rmtree(directory / WRITING_NAME, ignore_errors=True)


def _plan(lengths: NDArray[np.int64], facts: StateFacts, shard_bytes: int) -> list[int]:
    """First document of each shard, and the number of documents."""
    max_rows = max(shard_bytes // token_bytes(facts.layout, facts.dtype), 1)
    ends = np.cumsum(lengths)
    borders = [0]
    while borders[-1] < len(lengths):
        before = int(ends[borders[-1] - 1]) if borders[-1] else 0
        fitting = int(np.searchsorted(ends, before + max_rows, side="right"))
        borders.append(max(fitting, borders[-1] + 1))
    return borders


def _check_empty(directory: Path) -> None:
    """Nothing is mixed with files of somebody else."""
    if is_native(directory):
        raise DataError(
            f"{directory}: found a complete native directory, expected none. Choose another "
            "directory, or remove this one if it is not needed."
        )
    if directory.is_dir() and not (directory / WRITING_NAME).is_dir():
        others = sorted(path.name for path in directory.iterdir())[:3]
        if others:
            raise DataError(
                f"{directory}: found {', '.join(others)}, expected an empty directory or a new "
                "one. Choose another directory."
            )


def _name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"
