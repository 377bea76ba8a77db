"""Indexes kept between runs. The data directory itself is never written to."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from eagle3.data.store import Store
from eagle3.errors import DataError

_VERSION = 4
"""Another one for every change of what is stored, or of how it is found."""
_DIGEST_BYTES = 16
_STAT_THREADS = 8
_STAT_FILES = 1024


def locate(store: Store, max_samples: int | None, cache: Path) -> Path:
    """Where the index of these files is kept.

    The key covers name, size and modification time of every file and the expected layout, so a
    file that was added, replaced or repaired makes a new index; the directory's own path is not in
    it, so that a directory that moved finds its index again.

    Raises:
        DataError: the cache lies inside the data directory.
    """
    directory = store.directory.resolve()
    if cache.resolve().is_relative_to(directory):
        raise DataError(
            f"paths.cache: found {cache} inside the data directory {directory}, expected a place "
            "outside it. Set paths.cache to another directory."
        )
    paths = [f"{directory}/{name}" for name in store.files[:max_samples]]
    paths += [str(path) for path in store.side_files]
    layout = store.layout
    sizes = [layout.num_aux_layers, layout.hidden_size, layout.vocab_size]
    key = json.dumps([_VERSION, type(store).__name__, sizes, max_samples, _stats(paths)])
    return cache / "index" / f"{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}.npz"


def load(path: Path) -> dict[str, NDArray] | None:
    """The stored arrays; None when there are none, or they are damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    arrays, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if _digest(arrays) != digest:
        return None
    with np.load(io.BytesIO(arrays), allow_pickle=False) as stored:
        return dict(stored)


def save(path: Path, arrays: dict[str, NDArray]) -> None:
    """Write in one step, so that processes which index at the same time cannot disturb each other.

    Raises:
        DataError: the cache cannot be written.
    """
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    partial = path.with_name(f"{path.stem}.{uuid4().hex}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content.getvalue() + _digest(content.getvalue()))
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise DataError(
            f"paths.cache: cannot write {path} ({error}), expected a writable directory. "
            "Set paths.cache to another one."
        ) from error


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _stats(paths: Sequence[str]) -> list[tuple[str, int, int]]:
    """Name, size and time of files, asked for in threads: a network answers late."""
    chunks = [paths[i : i + _STAT_FILES] for i in range(0, len(paths), _STAT_FILES)]
    with ThreadPoolExecutor(_STAT_THREADS) as pool:
        found = pool.map(lambda chunk: [_stat(path) for path in chunk], chunks)
        return list(chain.from_iterable(found))


def _stat(path: str) -> tuple[str, int, int]:
    name = path.rpartition("/")[2]
    try:
        stat = os.stat(path)  # noqa: PTH116  # a Path costs more than the call
    except OSError:  # a dangling link; reading it will say so
        return name, -1, -1
    return name, stat.st_size, stat.st_mtime_ns
