"""``index.npz`` of a native directory: every sample, so that no shard is opened to plan an epoch.

=============================  =====================================================================
``sample_hash, prompt_hash``   uint64 [D]
``shard, start, length``       int64 [D]: number of the shard, first row in its tensors, tokens
``run_offsets, run_bounds``    supervised tokens, see :class:`eagle3.data.masks.Runs`
``sources, source``            labels, and the place of each sample's label among them; "" is none
``crc32``                      uint32 [D, 4]: of the sample's bytes in each tensor of the shard
=============================  =====================================================================
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from eagle3.data.index import DocumentIndex
from eagle3.data.masks import Runs
from eagle3.data.native_manifest import INDEX_NAME, Manifest, digest
from eagle3.data.segments import offsets_of
from eagle3.errors import DataError

_KINDS = {
    "sample_hash": "u",
    "prompt_hash": "u",
    "shard": "i",
    "start": "i",
    "length": "i",
    "run_offsets": "i",
    "run_bounds": "i",
    "sources": "U",
    "source": "i",
    "crc32": "u",
}


@dataclass(frozen=True, eq=False)
class Documents:
    """D documents without their bytes."""

    lengths: NDArray[np.int64]
    """[D], tokens."""
    runs: Runs
    """Supervised tokens as captured."""
    sample_hash: NDArray[np.uint64]
    """[D], see :func:`eagle3.data.hashing.hash_document`."""
    prompt_hash: NDArray[np.uint64]
    """[D]"""
    sources: tuple[str, ...]
    """Labels; the empty one: none."""
    source: NDArray[np.int64]
    """[D], place in ``sources``."""

    @classmethod
    def of_index(cls, index: DocumentIndex) -> Documents:
        """The documents of a directory in any format."""
        return cls(
            index.lengths,
            index.runs,
            index.sample_hash,
            index.prompt_hash,
            index.sources,
            index.source,
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, places: NDArray[np.int64]) -> Documents:
        """The documents at ``places``."""
        sizes = np.diff(self.runs.offsets)[places]
        offsets = offsets_of(sizes)
        first = np.repeat(self.runs.offsets[places] - offsets[:-1], sizes)
        return Documents(
            lengths=self.lengths[places],
            runs=Runs(offsets, self.runs.bounds[first + np.arange(offsets[-1])]),
            sample_hash=self.sample_hash[places],
            prompt_hash=self.prompt_hash[places],
            sources=self.sources,
            source=self.source[places],
        )


@dataclass(frozen=True, eq=False)
class NativeIndex:
    """The documents of a native directory, their places and their checksums."""

    documents: Documents
    shard: NDArray[np.int64]
    """[D], place in the manifest's list."""
    start: NDArray[np.int64]
    """[D], first row."""
    crc32: NDArray[np.uint32]
    """[D, 4]"""

    def __len__(self) -> int:
        return len(self.shard)

    def to_bytes(self) -> bytes:
        """The content of ``index.npz``."""
        documents = self.documents
        buffer = io.BytesIO()
        np.savez(
            buffer,
            sample_hash=documents.sample_hash,
            prompt_hash=documents.prompt_hash,
            shard=self.shard,
            start=self.start,
            length=documents.lengths,
            run_offsets=documents.runs.offsets,
            run_bounds=documents.runs.bounds,
            sources=np.array(documents.sources, np.str_),
            source=documents.source,
            crc32=self.crc32,
        )
        return buffer.getvalue()


def read_index(directory: Path, manifest: Manifest) -> NativeIndex:
    """Read ``index.npz`` and compare it with the manifest.

    Raises:
        DataError: it is missing, damaged, or belongs to another directory.
    """
    path = directory / INDEX_NAME
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}). Check the disk and the file.") from None
    found = digest(content)
    if found != manifest.index_blake2b:
        raise DataError(
            f"{path}: found {len(content):,} bytes with the checksum {found}, expected "
            f"{manifest.index_blake2b} as in the manifest: it is damaged or belongs to "
            "another directory. Copy it again from its origin, or convert the directory again."
        )
    return _check(_parse(content, path), manifest, path)


def _parse(content: bytes, path: Path) -> NativeIndex:
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as stored:
            arrays = {key: stored[key] for key in _KINDS}
    except (KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{path}: found no such index ({error}), expected the arrays {', '.join(_KINDS)}. "
            "It was not written by eagle3: convert the directory again."
        ) from error
    for key, kind in _KINDS.items():
        if arrays[key].dtype.kind != kind:
            raise DataError(
                f"{path}: key '{key}': found {arrays[key].dtype}, expected kind {kind!r}. It was "
                "not written by eagle3: convert the directory again."
            )
    documents = Documents(
        lengths=arrays["length"].astype(np.int64, copy=False),
        runs=Runs(arrays["run_offsets"], arrays["run_bounds"]),
        sample_hash=arrays["sample_hash"],
        prompt_hash=arrays["prompt_hash"],
        sources=tuple(arrays["sources"].tolist()),
        source=arrays["source"],
    )
    return NativeIndex(documents, arrays["shard"], arrays["start"], arrays["crc32"])


def _check(index: NativeIndex, manifest: Manifest, path: Path) -> NativeIndex:
    """Index and manifest must tell the same."""
    documents, lengths = index.documents, index.documents.lengths
    rows = [shard.num_tokens for shard in manifest.shards]
    filled = np.bincount(index.shard, lengths, minlength=len(rows)).astype(np.int64).tolist()
    supervised = int(documents.runs.totals().sum())
    facts = (
        ("num_samples", len(index), manifest.num_samples),
        ("num_supervised_tokens", supervised, manifest.num_supervised_tokens),
        ("fingerprint", fingerprint(documents.sample_hash), manifest.fingerprint),
        ("tokens of each shard", filled, rows),
        ("documents end to end", _is_end_to_end(index), True),
    )
    for name, found, expected in facts:
        if found != expected:
            raise DataError(
                f"{path}: {name}: found {found!r:.80}, expected {expected!r:.80} as in the "
                "manifest. Index and manifest belong to different directories: copy both again "
                "from their origin, or convert the directory again."
            )
    return index


def _is_end_to_end(index: NativeIndex) -> bool:
    return np.array_equal(index.start, first_rows(index.documents, index.shard))


def fingerprint(sample_hash: NDArray[np.uint64]) -> str:
    """As :attr:`eagle3.data.index.DocumentIndex.fingerprint`, from the hashes [D] alone."""
    return hashlib.blake2b(np.sort(sample_hash).tobytes(), digest_size=8).hexdigest()


def first_rows(documents: Documents, shard: NDArray[np.int64]) -> NDArray[np.int64]:
    """[D], where each document starts when those of a shard lie one after another."""
    before = np.cumsum(documents.lengths) - documents.lengths
    changes = np.flatnonzero(np.diff(shard, prepend=-1))
    sizes = np.diff([*changes, len(shard)])
    return before - np.repeat(before[changes], sizes)
