"""Index of a directory: what each document is and where its bytes are; and who validates.

Hashes follow from token ids and captured masks alone. A copied, renamed or recaptured directory
has the same fingerprint and the same validation documents.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from eagle3.data import index_cache
from eagle3.data.bad_samples import BadSamples
from eagle3.data.hashing import hash_set
from eagle3.data.layout import LayoutError
from eagle3.data.masks import Runs
from eagle3.data.probing import Result, probe_files
from eagle3.data.store import DocumentRecord, Store, attempt
from eagle3.errors import DataError
from eagle3.names import LastHidden

logger = logging.getLogger(__name__)
_PROGRESS_S = 5.0


@dataclass(frozen=True)
class ShardDescription:
    """What the rest of the program needs to know about a directory."""

    aux_layer_ids: tuple[int, ...]
    """*entering* convention, low to high."""
    last_hidden: LastHidden
    num_aux_layers: int
    hidden_size: int
    num_documents: int
    """Documents of at least two tokens."""
    fingerprint: str
    """Hash of the documents' token ids, whatever their order and place."""
    declared_by: dict[str, str]
    """Where each declared fact came from."""


@dataclass(frozen=True, eq=False)
class DocumentIndex:
    """The D usable documents of a directory, in its order. Planning and reading need nothing else.

    The bytes of the token ids of document d are ``ids_bytes[d] * lengths[d]`` from
    ``ids_offset[d]`` of file ``files[file[d]]``; plane p of its states starts at
    ``state_offsets[d, p]`` (see :mod:`eagle3.data.layout`).
    """

    files: tuple[str, ...]
    """File names, F of them."""
    file: NDArray[np.int64]
    """[D], place in ``files``."""
    lengths: NDArray[np.int64]
    """[D], tokens."""
    runs: Runs
    """Supervised tokens as captured."""
    sample_hash: NDArray[np.uint64]
    """[D], of all token ids."""
    prompt_hash: NDArray[np.uint64]
    """[D], of the token ids before the first supervised one; of all where that leaves nothing."""
    ids_offset: NDArray[np.int64]
    """[D]"""
    ids_bytes: NDArray[np.int64]
    """[D], 2, 4 or 8."""
    state_offsets: NDArray[np.int64]
    """[D, P]"""
    sources: tuple[str, ...]
    """Labels that the directory gives its documents; the empty one: none."""
    source: NDArray[np.int64]
    """[D], place in ``sources``."""
    dtype: torch.dtype
    """Of the states."""
    too_short: int = 0
    """Documents of less than two tokens, skipped."""
    bad: tuple[tuple[str, str], ...] = ()
    """Path and reason of unusable files, skipped."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def fingerprint(self) -> str:
        """Hash of the set of documents."""
        return hash_set(self.sample_hash)

    def file_name(self, document: int) -> str:
        """Name of the file that holds a document."""
        return self.files[int(self.file[document])]


@runtime_checkable
class IndexedStore(Protocol):
    """A store whose directory has an index of its own."""

    def stored_index(self, max_samples: int | None) -> DocumentIndex:
        """All documents, or the first ``max_samples``.

        Raises:
            DataError: the index is damaged, or a file it names is missing or cut.
        """


def index_records(
    records: Sequence[DocumentRecord], too_short: int = 0, bad: Sequence[tuple[str, str]] = ()
) -> DocumentIndex:
    """Lay records side by side; at least one, and all of one dtype."""
    files = list(dict.fromkeys(r.file for r in records))
    sources = list(dict.fromkeys(r.source for r in records))
    place_of_file = {name: place for place, name in enumerate(files)}
    place_of_source = {name: place for place, name in enumerate(sources)}

    def column(values: list[int]) -> NDArray[np.int64]:
        return np.array(values, np.int64)

    return DocumentIndex(
        files=tuple(files),
        file=column([place_of_file[r.file] for r in records]),
        lengths=column([r.length for r in records]),
        runs=Runs.stack(r.runs for r in records),
        sample_hash=np.array([r.sample_hash for r in records], np.uint64),
        prompt_hash=np.array([r.prompt_hash for r in records], np.uint64),
        ids_offset=column([r.ids_offset for r in records]),
        ids_bytes=column([r.ids_bytes for r in records]),
        state_offsets=np.array([r.state_offsets for r in records], np.int64),
        sources=tuple(sources),
        source=column([place_of_source[r.source] for r in records]),
        dtype=getattr(torch, records[0].dtype),
        too_short=too_short,
        bad=tuple(bad),
    )


def build_index(
    store: Store,
    cache: Path | str,
    bad_samples: BadSamples,
    num_workers: int,
    max_samples: int | None = None,
) -> DocumentIndex:
    """Probe the files of ``store``, or take their index from the directory or from ``cache``.

    Bad files go to ``bad_samples``. ``max_samples`` keeps the first so many documents; None: all.

    Raises:
        DataError: the first readable file has another layout than configured, there are too many
            bad files, or no document is left.
    """
    if isinstance(store, IndexedStore):
        return store.stored_index(max_samples)
    path = index_cache.locate(store, max_samples, Path(cache))
    stored = index_cache.load(path)
    index = None if stored is None else _from_arrays(stored, store)
    if index is None:
        started = time.monotonic()
        index = _probe_all(store, bad_samples, num_workers, max_samples)
        index_cache.save(path, _to_arrays(index, store))
        logger.info(
            "indexed %s: %s files, %s tokens in %.1f s",
            store.directory,
            f"{len(store.files[:max_samples]):,}",
            f"{int(index.lengths.sum()):,}",
            time.monotonic() - started,
        )
    for sample, reason in index.bad:
        bad_samples.add(sample, reason)
    return index


def validation_documents(prompt_hash: NDArray[np.uint64], val_ratio: float) -> NDArray[np.bool_]:
    """Choose whole prompts for validation, by the prompt's hash alone.

    With ``val_ratio`` > 0 and at least two prompts, both sides get at least one.

    Returns:
        [D], true for validation.
    """
    prompts = np.unique(prompt_hash)
    if val_ratio <= 0 or len(prompts) < 2:
        return np.zeros(len(prompt_hash), np.bool_)
    below = int(np.searchsorted(prompts, np.uint64(min(int(val_ratio * 2**64), 2**64 - 1))))
    last = prompts[min(max(below, 1), len(prompts) - 1) - 1]
    return prompt_hash <= last


def _probe_all(
    store: Store, bad_samples: BadSamples, num_workers: int, max_samples: int | None
) -> DocumentIndex:
    records: list[DocumentRecord] = []
    bad: list[tuple[str, str]] = []
    seen = too_short = 0
    for file, result in _probe_in_order(store, num_workers, max_samples):
        if isinstance(result, LayoutError) and not records:
            raise LayoutError(
                f"{result}\nThe first readable file is so, hence the config and this directory do "
                "not belong together."
            )
        if records:
            result = _same_dtype(result, records[0].dtype, records[0].file, store.directory / file)
        if isinstance(result, DataError):
            bad.append((str(store.directory / file), str(result)))
            bad_samples.add(*bad[-1])
            seen += 1
            continue
        found = result if max_samples is None else result[: max(max_samples - seen, 0)]
        seen += len(found)
        too_short += sum(record.length < 2 for record in found)
        records += [record for record in found if record.length >= 2]
    if not records:
        raise DataError(
            "\n".join(
                [
                    f"{store.directory}: found {len(store.files)} files, {len(bad)} of them bad "
                    f"and {too_short} documents shorter than two tokens, expected at least one "
                    "usable document.",
                    *(f"  {reason}" for _, reason in bad[:10]),
                ]
            )
        )
    return index_records(records, too_short, bad)


def _same_dtype(result: Result, dtype: str, first_file: str, path: Path) -> Result:
    if isinstance(result, DataError) or all(record.dtype == dtype for record in result):
        return result
    return DataError(
        f"{path}: key 'hidden_states': found {result[0].dtype}, expected {dtype} as in "
        f"{first_file}. Capture the sample again."
    )


def _probe_in_order(
    store: Store, num_workers: int, max_samples: int | None
) -> Iterator[tuple[str, Result]]:
    """Results in the order of the files, with a line of progress every few seconds."""
    files = store.files[:max_samples]  # a file holds one document or more
    done, started = 0, time.monotonic()
    reported = started
    with closing(probe_files(store, files, num_workers)) as chunks:
        for results in chunks:
            yield from zip(files[done:], results, strict=False)
            done += len(results)
            now = time.monotonic()
            if now - reported > _PROGRESS_S:
                reported = now
                rate = done / max(now - started, 1e-9)
                left = int((len(files) - done) / rate)
                logger.info(
                    "indexing %s: %s of %s files (%.0f%%), %s files/s, %d:%02d left",
                    store.directory,
                    f"{done:,}",
                    f"{len(files):,}",
                    100 * done / len(files),
                    f"{rate:,.0f}",
                    left // 60,
                    left % 60,
                )


def _to_arrays(index: DocumentIndex, store: Store) -> dict[str, NDArray]:
    bad = [str(Path(path).relative_to(store.directory)) for path, _ in index.bad]
    return {
        "files": np.array(index.files, np.str_),
        "file_of": index.file,
        "lengths": index.lengths,
        "run_offsets": index.runs.offsets,
        "run_bounds": index.runs.bounds,
        "sample_hash": index.sample_hash,
        "prompt_hash": index.prompt_hash,
        "ids_offset": index.ids_offset,
        "ids_bytes": index.ids_bytes,
        "state_offsets": index.state_offsets,
        "sources": np.array(index.sources, np.str_),
        "source": index.source,
        "dtype": np.array(_dtype_name(index.dtype)),
        "too_short": np.array(index.too_short),
        "bad": np.array(bad, np.str_),
    }


def _from_arrays(arrays: dict[str, NDArray], store: Store) -> DocumentIndex | None:
    """The stored index; None when a file that was bad is not any more.

    A disk that failed for a moment must not cost a document for ever, and messages name the place
    where the directory is now: so bad files, of which there are few, are probed again.
    """
    index = DocumentIndex(
        files=tuple(arrays["files"].tolist()),
        file=arrays["file_of"],
        lengths=arrays["lengths"],
        runs=Runs(arrays["run_offsets"], arrays["run_bounds"]),
        sample_hash=arrays["sample_hash"],
        prompt_hash=arrays["prompt_hash"],
        ids_offset=arrays["ids_offset"],
        ids_bytes=arrays["ids_bytes"],
        state_offsets=arrays["state_offsets"],
        sources=tuple(arrays["sources"].tolist()),
        source=arrays["source"],
        dtype=getattr(torch, str(arrays["dtype"])),
        too_short=int(arrays["too_short"]),
    )
    bad = []
    for file in arrays["bad"].tolist():
        path = store.directory / file
        result = _same_dtype(attempt(store, file), _dtype_name(index.dtype), index.files[0], path)
        if not isinstance(result, DataError):
            return None
        bad.append((str(path), str(result)))
    return replace(index, bad=tuple(bad))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
