"""Identity of documents: by their token ids, never by path or time."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def hash_ids(ids: NDArray[np.integer]) -> int:
    """64-bit hash of token ids, whatever integer type they are stored in."""
    return _number(_hash(ids))


def hash_document(ids: NDArray[np.integer], runs: NDArray[np.int64]) -> tuple[int, int]:
    """Hashes of the sample and of its prompt: the ids before the first supervised one.

    The prompt of a document that is supervised from the start, or nowhere, is all of it.
    """
    prompt = int(runs[0, 0]) if len(runs) else 0
    if prompt == 0:
        whole = hash_ids(ids)
        return whole, whole
    state = _hash(ids[:prompt])
    prompt_hash = _number(state)
    state.update(_content(ids[prompt:]))
    return _number(state), prompt_hash


def hash_set(hashes: NDArray[np.uint64]) -> str:
    """16 hexadecimal digits for a set of documents, whatever their order."""
    return hashlib.blake2b(np.sort(hashes).tobytes(), digest_size=8).hexdigest()


def sample_id(sample_hash: int) -> str:
    """The hash as people see it, 16 hexadecimal digits."""
    return f"{sample_hash:016x}"


def _content(ids: NDArray[np.integer]) -> memoryview:
    return np.ascontiguousarray(ids, "<i8").data


def _hash(ids: NDArray[np.integer]) -> hashlib.blake2b:
    return hashlib.blake2b(_content(ids), digest_size=8)


def _number(state: hashlib.blake2b) -> int:
    return int.from_bytes(state.digest(), "little")
