"""Index of a directory: what each document is, without its states; and who validates.

Hashes follow from token ids and captured masks alone. A copied, renamed or recaptured directory
has the same fingerprint and the same validation documents.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from eagle3.data import index_cache
from eagle3.data.bad_samples import BadSamples
from eagle3.data.formats import LayoutError, Sample, SpeculatorsV1
from eagle3.data.masks import Runs, supervised_runs
from eagle3.errors import DataError
from eagle3.names import LastHidden

logger = logging.getLogger(__name__)
_CHUNK_FILES = 64
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
    """The D usable documents of a directory, in its order."""

    names: tuple[str, ...]
    """File names."""
    lengths: NDArray[np.int64]
    """Tokens."""
    runs: Runs
    """Supervised tokens as captured."""
    sample_hash: NDArray[np.uint64]
    """Of all token ids."""
    prompt_hash: NDArray[np.uint64]
    """Of the token ids before the first supervised one; of all where that leaves nothing."""
    dtype: torch.dtype
    """Of the states."""
    too_short: int = 0
    """Documents of less than two tokens, skipped."""
    bad: tuple[tuple[str, str], ...] = ()
    """Path and reason of unusable files, skipped."""

    def __len__(self) -> int:
        return len(self.names)

    @property
    def fingerprint(self) -> str:
        """Hash of the set of documents."""
        return hashlib.blake2b(np.sort(self.sample_hash).tobytes(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class _Record:
    """One document, as probed."""

    name: str
    length: int
    runs: NDArray[np.int64]
    sample_hash: int
    prompt_hash: int
    dtype: torch.dtype


def build_index(
    reader: SpeculatorsV1,
    names: Sequence[str],
    cache: Path | str,
    bad_samples: BadSamples,
    num_workers: int,
) -> DocumentIndex:
    """Probe ``names``, or take their index from ``cache``; bad files go to ``bad_samples``.

    Raises:
        DataError: the first readable file has another layout than configured, there are too many
            bad files, or no document is left.
    """
    path = index_cache.locate(reader, names, Path(cache))
    stored = index_cache.load(path)
    if stored is None:
        index = _probe_all(reader, names, bad_samples, num_workers)
        index_cache.save(path, _to_arrays(index))
        return index
    index = _from_arrays(stored)
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
    reader: SpeculatorsV1, names: Sequence[str], bad_samples: BadSamples, num_workers: int
) -> DocumentIndex:
    records: list[_Record] = []
    bad: list[tuple[str, str]] = []
    too_short = 0
    for name, result in _probe_in_order(reader, names, num_workers):
        if isinstance(result, LayoutError) and not records:
            raise LayoutError(
                f"{result}\nThe first readable file is so, hence the config and this directory do "
                "not belong together."
            )
        if isinstance(result, _Record) and records and result.dtype != records[0].dtype:
            result = DataError(
                f"{reader.directory / name}: key 'hidden_states': found {result.dtype}, expected "
                f"{records[0].dtype} as in {records[0].name}. Capture the sample again."
            )
        if isinstance(result, DataError):
            bad.append((str(reader.directory / name), str(result)))
            bad_samples.add(*bad[-1])
        elif result.length < 2:
            too_short += 1
        else:
            records.append(result)
    if not records:
        raise DataError(
            "\n".join(
                [
                    f"{reader.directory}: found {len(names)} files, {len(bad)} of them bad and "
                    f"{too_short} shorter than two tokens, expected at least one usable document.",
                    *(f"  {reason}" for _, reason in bad[:10]),
                ]
            )
        )
    return DocumentIndex(
        names=tuple(r.name for r in records),
        lengths=np.array([r.length for r in records], np.int64),
        runs=Runs.stack(r.runs for r in records),
        sample_hash=np.array([r.sample_hash for r in records], np.uint64),
        prompt_hash=np.array([r.prompt_hash for r in records], np.uint64),
        dtype=records[0].dtype,
        too_short=too_short,
        bad=tuple(bad),
    )


def _probe_in_order(
    reader: SpeculatorsV1, names: Sequence[str], num_workers: int
) -> Iterator[tuple[str, _Record | DataError]]:
    """Probe in threads; results come in the order of ``names``."""
    chunks = [names[i : i + _CHUNK_FILES] for i in range(0, len(names), _CHUNK_FILES)]
    done, reported = 0, time.monotonic()
    pool = ThreadPoolExecutor(num_workers, thread_name_prefix="eagle3-index")
    try:
        for results in pool.map(lambda chunk: [_probe(reader, name) for name in chunk], chunks):
            yield from zip(names[done:], results, strict=False)
            done += len(results)
            if time.monotonic() - reported > _PROGRESS_S:
                reported = time.monotonic()
                logger.info("indexing %s: %d of %d files", reader.directory, done, len(names))
    finally:
        pool.shutdown(cancel_futures=True)


def _probe(reader: SpeculatorsV1, name: str) -> _Record | DataError:
    try:
        sample = reader.open(name)
    except DataError as error:
        return error
    runs = supervised_runs(sample.loss_mask.numpy())
    prompt = int(runs[0, 0]) if len(runs) else 0
    return _Record(
        name=name,
        length=len(sample),
        runs=runs,
        sample_hash=_hash_ids(sample, len(sample)),
        prompt_hash=_hash_ids(sample, prompt or len(sample)),
        dtype=sample.last_hidden.dtype,
    )


def _hash_ids(sample: Sample, stop: int) -> int:
    content = sample.input_ids[:stop].numpy().astype("<i8").tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _to_arrays(index: DocumentIndex) -> dict[str, NDArray]:
    return {
        "names": np.array(index.names, np.str_),
        "lengths": index.lengths,
        "run_offsets": index.runs.offsets,
        "run_bounds": index.runs.bounds,
        "sample_hash": index.sample_hash,
        "prompt_hash": index.prompt_hash,
        "dtype": np.array(str(index.dtype).removeprefix("torch.")),
        "too_short": np.array(index.too_short),
        "bad": np.array(index.bad, np.str_).reshape(-1, 2),
    }


def _from_arrays(arrays: dict[str, NDArray]) -> DocumentIndex:
    return DocumentIndex(
        names=tuple(arrays["names"].tolist()),
        lengths=arrays["lengths"],
        runs=Runs(arrays["run_offsets"], arrays["run_bounds"]),
        sample_hash=arrays["sample_hash"],
        prompt_hash=arrays["prompt_hash"],
        dtype=getattr(torch, str(arrays["dtype"])),
        too_short=int(arrays["too_short"]),
        bad=tuple((str(sample), str(reason)) for sample, reason in arrays["bad"]),
    )
