"""Opening what should be a file, whatever else may have its name."""

from __future__ import annotations

import os
import stat
from pathlib import Path

READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""Flags for reading a file; a named pipe that nobody writes to does not keep us waiting."""


def open_plain(path: Path) -> int:
    """A descriptor to read from.

    Raises:
        OSError: the system refuses, or it is a directory, a named pipe or a device.
    """
    descriptor = os.open(path, READ)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    kind = "a directory" if stat.S_ISDIR(mode) else "a named pipe or a device"
    raise OSError(f"{kind}, no file")
