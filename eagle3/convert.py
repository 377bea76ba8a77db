"""Any readable directory of captured states -> a native one, with the source left untouched.

::

    reader threads    document -> 32 MB of rows at a time -> their place in the shard + checksums
    a few more        a filled shard: synced, read back, compared with the checksums, renamed

Killed at any point and started again, it goes on (:mod:`eagle3.data.native_writer`) and ends with
the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import eagle3
from eagle3.byte_progress import ByteProgress
from eagle3.data.bad_samples import BadSamples
from eagle3.data.declaration import Declaration, resolve_declaration
from eagle3.data.disk import free_bytes, size
from eagle3.data.formats import open_store
from eagle3.data.hashing import sample_id
from eagle3.data.index import build_index
from eagle3.data.layout import StateLayout
from eagle3.data.native import NativeStore, is_native
from eagle3.data.native_index import Documents
from eagle3.data.native_manifest import StateFacts, VerifierFacts
from eagle3.data.native_shard import token_bytes
from eagle3.data.native_shard_writer import ShardWriter
from eagle3.data.native_writer import SHARD_BYTES, NativeWriter, remove_leftovers
from eagle3.data.reading import StateReader, Target
from eagle3.data.sources import label
from eagle3.data.store import Store
from eagle3.errors import DataError
from eagle3.verifier_facts import read_verifier_facts

RECORD_NAME = "conversion.json"
"""Where the states came from and what was left out; training does not read it."""
_CHUNK_BYTES = 32 << 20


@dataclass(frozen=True)
class ConvertRequest:
    """What to convert, and how."""

    source: Path
    """A directory in any known format; only read."""
    out: Path
    """A new directory, or one in which the same conversion was interrupted."""
    layout: StateLayout
    declaration: Declaration
    """What the user says about the states; what the source says need not be said."""
    cache: Path
    """Where the index of the source is kept."""
    verifier: Path | None = None
    """Its directory, for the manifest; None: not recorded unless the source is native."""
    arrow: Path | None = None
    source_labels: Path | None = None
    shard_bytes: int = SHARD_BYTES
    num_workers: int = 4
    """Threads that read."""
    max_samples: int | None = None
    max_bad_samples: int = 0
    """Unusable samples to leave out; one more stops the conversion."""


@dataclass(frozen=True)
class ConvertSummary:
    """What is in the new directory."""

    num_samples: int
    num_tokens: int
    num_bytes: int
    """Of the shards."""
    num_kept: int
    """Samples that an earlier, interrupted run had written."""
    skipped: tuple[str, ...]
    """A line for each unusable sample that was left out."""
    too_short: int
    """Samples of less than two tokens, left out too."""
    fingerprint: str
    seconds: float


@dataclass(frozen=True)
class _Job:
    """One conversion after all checks."""

    request: ConvertRequest
    reader: StateReader
    facts: StateFacts
    documents: Documents
    bad_files: tuple[str, ...]
    too_short: int

    @property
    def name(self) -> str:
        """Of the input, by content: documents, masks, labels, kind of states, size of shards."""
        documents, request = self.documents, self.request
        facts = [request.layout, self.facts, documents.sources, request.shard_bytes]
        found = hashlib.blake2b(repr(facts).encode(), digest_size=12)
        for array in (
            documents.sample_hash,
            documents.runs.offsets,
            documents.runs.bounds,
            documents.source,
        ):
            found.update(np.ascontiguousarray(array).tobytes())
        return found.hexdigest()

    def sample(self, document: int) -> str:
        """A document for people."""
        name = sample_id(int(self.documents.sample_hash[document]))
        return f"{self.reader.path(document)}, sample {name}"


def convert(request: ConvertRequest, log: Callable[[str], None]) -> ConvertSummary:
    """Write the documents of ``request.source`` as a native directory.

    Documents keep their order, so training on the new directory gives the same batches. Those of
    less than two tokens are left out, since nothing can be learned from them.

    Raises:
        DataError: nothing to convert, too many bad samples, a directory of something else, too
            little disk, or a disk that does not give back what was written.
        VerifierError: the verifier's directory cannot be read.
    """
    source, out = request.source.resolve(), request.out.resolve()
    if out == source or out.is_relative_to(source):
        raise DataError(
            f"{request.out}: found a place inside the source {request.source}, which is never "
            "written to. Choose a directory elsewhere."
        )
    bad_samples = BadSamples(request.max_bad_samples, "--max-bad-samples")
    store = open_store(request.source, request.layout, request.arrow)
    job = _prepare(request, store, bad_samples)
    verifier = _verifier_facts(request, store)
    done = _finished_before(job)
    return _run(job, verifier, bad_samples, log) if done is None else done


def _prepare(request: ConvertRequest, store: Store, bad_samples: BadSamples) -> _Job:
    layout = request.layout
    resolved = resolve_declaration(
        request.declaration, store.declaration(), layout.num_aux_layers, store.directory
    )
    index = build_index(store, request.cache, bad_samples, request.num_workers, request.max_samples)
    dtype = str(index.dtype).removeprefix("torch.")
    facts = StateFacts(layout, dtype, resolved.aux_layer_ids, resolved.last_hidden)
    sources, place = label(index, store.directory, request.source_labels)
    documents = replace(Documents.of_index(index), sources=sources, source=place)
    bad_files = tuple(reason for _, reason in index.bad)
    return _Job(request, StateReader(store, index), facts, documents, bad_files, index.too_short)


def _verifier_facts(request: ConvertRequest, store: Store) -> VerifierFacts:
    if request.verifier is not None:
        return read_verifier_facts(request.verifier)
    return store.manifest.verifier if isinstance(store, NativeStore) else VerifierFacts()


def _finished_before(job: _Job) -> ConvertSummary | None:
    """The summary of a directory that this conversion has completed; None: it has not."""
    out = job.request.out
    if not is_native(out):
        return None
    try:
        record: dict[str, Any] = json.loads((out / RECORD_NAME).read_bytes())
    except (OSError, ValueError):
        record = {}
    if record.get("job") != job.name:
        raise DataError(
            f"{out}: found a complete native directory of another conversion or capture, expected "
            f"none, or the one of {job.request.source} with these settings. Choose another "
            "directory, or remove this one if it is not needed."
        )
    remove_leftovers(out)
    manifest = NativeStore(out, job.request.layout).manifest
    return ConvertSummary(
        num_samples=manifest.num_samples,
        num_tokens=manifest.num_tokens,
        num_bytes=sum(shard.bytes for shard in manifest.shards),
        num_kept=manifest.num_samples,
        skipped=tuple(record["skipped"]),
        too_short=job.too_short,
        fingerprint=manifest.fingerprint,
        seconds=0.0,
    )


def _run(
    job: _Job, verifier: VerifierFacts, bad_samples: BadSamples, log: Callable[[str], None]
) -> ConvertSummary:
    request = job.request
    args = (request.out, job.facts, job.documents, job.name, request.shard_bytes)
    with NativeWriter(*args) as writer:
        for document, reason in writer.skipped.items():
            bad_samples.add(job.sample(document), reason)
        missing, kept = writer.missing_bytes(), writer.num_written
        log(
            f"convert: {len(job.documents):,} samples to {request.out}: {size(missing)} to write, "
            f"{size(free_bytes(request.out))} free; {kept:,} samples are there already"
        )
        progress = ByteProgress("convert", missing, log)
        _Filler(job, writer, bad_samples, progress).run()
        skipped = (*job.bad_files, *writer.skipped.values())
        record = {
            "job": job.name,
            "source": str(request.source),
            "skipped": skipped,
            "too_short": job.too_short,
        }
        writer.publish(RECORD_NAME, json.dumps(record, indent=2).encode() + b"\n")
        manifest = writer.complete(verifier, f"eagle3 {eagle3.__version__}")
    return ConvertSummary(
        num_samples=manifest.num_samples,
        num_tokens=manifest.num_tokens,
        num_bytes=sum(shard.bytes for shard in manifest.shards),
        num_kept=kept,
        skipped=skipped,
        too_short=job.too_short,
        fingerprint=manifest.fingerprint,
        seconds=progress.seconds,
    )


class _Filler:
    """Fills shard after shard; while one is finished, the next is filled."""

    def __init__(
        self, job: _Job, writer: NativeWriter, bad_samples: BadSamples, progress: ByteProgress
    ) -> None:
        self._job, self._writer = job, writer
        self._bad_samples, self._progress = bad_samples, progress
        self._token_bytes = token_bytes(job.facts.layout, job.facts.dtype)
        self._readers = ThreadPoolExecutor(job.request.num_workers, "eagle3-convert")
        self._max_finishing = max(job.request.num_workers // 2, 1)
        self._finishers = ThreadPoolExecutor(self._max_finishing, "eagle3-finish")

    def run(self) -> None:
        """Write everything that is missing."""
        finishing: deque[Future[None]] = deque()
        try:
            for number in range(self._writer.num_shards):
                shard = self._fill(number)
                if shard is None:
                    continue
                if len(finishing) == self._max_finishing:
                    finishing.popleft().result()
                finishing.append(self._finishers.submit(self._writer.finish, shard))
            for finished in finishing:
                finished.result()
        finally:
            self._readers.shutdown(cancel_futures=True)
            self._finishers.shutdown(cancel_futures=True)

    def _fill(self, number: int) -> ShardWriter | None:
        """A shard with all its documents; None: there is nothing to do about it."""
        while (shard := self._writer.open(number)) is not None:
            bad = self._copy_all(shard)
            if not bad:
                return shard
            # Without these documents the others have other places.
            shard.close(sync=False)
            for document, reason in bad:
                self._bad_samples.add(self._job.sample(document), reason)
                self._writer.skip(document, reason)
        return None

    def _copy_all(self, shard: ShardWriter) -> list[tuple[int, str]]:
        """Copy what is missing in a shard; the documents that could not be read, and why."""
        pending = {
            self._readers.submit(self._copy, shard, document): document
            for document in shard.missing
        }
        try:
            for copied in wait(pending, return_when=FIRST_EXCEPTION).done:
                copied.result()
            found = [(document, copied.result()) for copied, document in pending.items()]
        except BaseException:
            for copied in pending:
                copied.cancel()
            wait(pending)
            shard.close(sync=False)
            raise
        return [(document, reason) for document, reason in found if reason is not None]

    def _copy(self, shard: ShardWriter, document: int) -> str | None:
        """Copy one document; the reason when the source cannot be read."""
        reader, facts = self._job.reader, self._job.facts
        length = int(self._job.documents.lengths[document])
        rows = max(_CHUNK_BYTES // self._token_bytes, 1)
        out = shard.document(document)
        try:
            input_ids = reader.input_ids(document)
        except DataError as error:
            return str(error)
        for start in range(0, length, rows):
            count = min(rows, length - start)
            dtype = getattr(torch, facts.dtype)
            aux = torch.empty(count, facts.layout.aux_width, dtype=dtype)
            last = torch.empty(count, facts.layout.hidden_size, dtype=dtype)
            targets = [
                Target(facts.layout.aux, start, aux),
                Target(facts.layout.last, start, last),
            ]
            try:
                reader.read(document, targets)
            except DataError as error:
                return str(error)
            out.rows(aux, last)
            self._progress.add(count * self._token_bytes)
        mask = torch.from_numpy(self._job.documents.runs.mask(document, length))
        out.close(input_ids, mask)
        return None
