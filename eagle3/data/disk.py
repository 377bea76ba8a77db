"""Writing that survives a crash, and what to say when the disk refuses."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path

from eagle3.errors import DataError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_UNITS = ((1e12, 2**40, "TB", "TiB"), (1e9, 2**30, "GB", "GiB"), (1e6, 2**20, "MB", "MiB"))


def write_fully(file: int, content: memoryview, offset: int) -> None:
    """Write all of ``content`` at ``offset`` of an open file.

    Raises:
        OSError: the disk refuses.
    """
    done = 0
    while done < len(content):
        done += os.pwrite(file, content[done:], offset + done)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file and wait until the disk has it.

    Raises:
        OSError: the disk refuses.
    """
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def publish(temporary: Path, final: Path) -> None:
    """Give a synced file its name, and wait until the disk knows it.

    Raises:
        OSError: the disk refuses.
    """
    temporary.replace(final)
    directory = os.open(final.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_error(path: Path, error: OSError, missing_bytes: int) -> DataError:
    """What to tell when writing failed; ``missing_bytes`` were still to be written."""
    if error.errno not in _FULL:
        return DataError(
            f"{path}: cannot be written ({error}). Check the disk and the permissions, then start "
            "the same command again; it goes on where it stopped."
        )
    return DataError(
        f"{path}: the disk is full ({error.strerror}): {size(missing_bytes)} are still to be "
        f"written, {size(free_bytes(path))} are free. Nothing is lost: free some space, or raise "
        "the quota, and start the same command again; it goes on where it stopped."
    )


def check_space(directory: Path, missing_bytes: int) -> None:
    """Refuse to begin what cannot end.

    Raises:
        DataError: less is free than will be written.
    """
    free = free_bytes(directory)
    if missing_bytes > free:
        raise DataError(
            f"{directory}: {size(missing_bytes)} will be written, but only {size(free)} are free. "
            "Free some space, or choose a directory on another disk."
        )


def free_bytes(path: Path) -> int:
    """Free bytes on the disk that holds ``path`` or would hold it; 0 where nobody can say."""
    existing = next((p for p in (path, *path.absolute().parents) if p.exists()), None)
    with contextlib.suppress(OSError):
        return 0 if existing is None else shutil.disk_usage(existing).free
    return 0


def size(num_bytes: float) -> str:
    """``3.65 GB (3.40 GiB)``: as disks are sold, and as most tools print it."""
    for decimal, binary, name, binary_name in _UNITS:
        if num_bytes >= decimal:
            return f"{num_bytes / decimal:.2f} {name} ({num_bytes / binary:.2f} {binary_name})"
    return f"{num_bytes:,.0f} bytes"
