"""One process at a time: an advisory file lock that dies with its holder."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from eagle3.errors import UserError


@contextmanager
def exclusive(lock_file: Path, log: Callable[[str], None]) -> Iterator[None]:
    """Hold ``lock_file`` (made with its parents if missing), waiting for another holder.

    The kernel releases the lock when the process ends, also after ``kill -9``, so there is no
    stale lock to remove. The file itself stays.

    Raises:
        UserError: the file system offers no locks.
    """
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    with lock_file.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log(f"waiting: another process holds {lock_file}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            raise UserError(
                f"{lock_file}: cannot be locked ({error}); expected a file system with flock. "
                "Choose a directory on another disk."
            ) from error
        yield
