"""Indexes kept between runs. The data directory itself is never written to."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from eagle3.data.formats import SpeculatorsV1
from eagle3.errors import DataError

_VERSION = 1
_ARRAYS = {
    "names",
    "lengths",
    "run_offsets",
    "run_bounds",
    "sample_hash",
    "prompt_hash",
    "dtype",
    "too_short",
    "bad",
}


def locate(reader: SpeculatorsV1, names: Sequence[str], cache: Path) -> Path:
    """Where the index of these files is kept.

    The key covers name, size and modification time of every file and the expected layout, so a
    file that was added, replaced or repaired makes a new index.

    Raises:
        DataError: the cache lies inside the data directory.
    """
    directory = reader.directory.resolve()
    if cache.resolve().is_relative_to(directory):
        raise DataError(
            f"paths.cache: found {cache} inside the data directory {directory}, expected a place "
            "outside it. Set paths.cache to another directory."
        )
    files = [_stat(directory / name) for name in names]
    layout = reader.layout
    sizes = [layout.num_aux_layers, layout.hidden_size, layout.vocab_size]
    key = json.dumps([_VERSION, str(directory), sizes, files])
    return cache / "index" / f"{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}.npz"


def load(path: Path) -> dict[str, NDArray] | None:
    """The stored arrays; None when there are none, or none that can be read."""
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            arrays = dict(stored)
            return arrays if arrays.keys() == _ARRAYS else None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return None


def save(path: Path, arrays: dict[str, NDArray]) -> None:
    """Write in one step, so that ranks which index at the same time cannot disturb each other.

    Raises:
        DataError: the cache cannot be written.
    """
    partial = path.with_name(f"{path.stem}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise DataError(
            f"paths.cache: cannot write {path} ({error}), expected a writable directory. "
            "Set paths.cache to another one."
        ) from error


def _stat(path: Path) -> tuple[str, int, int]:
    try:
        stat = path.stat()
    except OSError:  # a dangling link; reading it will say so
        return path.name, -1, -1
    return path.name, stat.st_size, stat.st_mtime_ns
