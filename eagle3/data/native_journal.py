"""What has been written of a native directory: one line a finished sample or shard.

Lines are appended while a directory is written and read when the writing is taken up again. A line
that was cut by a crash is not there. Nothing in it is trusted: what it lists is compared with the
bytes on disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3.errors import DataError


@dataclass
class JournalContent:
    """What the lines say together; the last word on a sample or a shard counts."""

    job: str | None = None
    """Name of the job that writes; None: the journal is new."""
    samples: dict[int, tuple[int, int, int, int]] = field(default_factory=dict)
    """Written documents and the CRC-32 of their bytes in each tensor."""
    skipped: dict[int, str] = field(default_factory=dict)
    """Documents that are left out, and why."""
    finished: dict[int, str] = field(default_factory=dict)
    """Whole shards and their blake2b."""


class Journal:
    """The file, open for appending, by one process at a time. Safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        """Make it if missing, and read it.

        Raises:
            DataError: another process has it.
            OSError: it cannot be read or written.
        """
        self._lock = threading.Lock()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._file)
            raise DataError(
                f"{path.parent.parent}: found another process that writes this directory, expected "
                "none. Wait until it ends, or stop it; then start this command again."
            ) from error
        self.content = JournalContent()
        whole = 0
        with open(self._file, "rb", closefd=False) as lines:
            for line in lines:
                if not line.endswith(b"\n") or not _take(line, self.content):
                    break
                whole += len(line)
        os.ftruncate(self._file, whole)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def start(self, job: str) -> None:
        """The first line."""
        self._append({"job": job})
        os.fsync(self._file)

    def add_sample(self, document: int, crc32: tuple[int, int, int, int]) -> None:
        """A document's bytes are written."""
        self._append({"sample": document, "crc32": crc32})

    def skip(self, document: int, reason: str) -> None:
        """A document is left out."""
        self._append({"skipped": document, "reason": reason})

    def finish(self, shard: int, blake2b: str) -> None:
        """A shard is whole, compared and in place."""
        self._append({"finished": shard, "blake2b": blake2b})
        os.fsync(self._file)

    def _append(self, entry: dict[str, Any]) -> None:
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            done = os.fstat(self._file).st_size
            try:
                written = 0
                while written < len(line):
                    written += os.write(self._file, line[written:])
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, done)
                raise
            _take(line, self.content)


def _take(line: bytes, content: JournalContent) -> bool:
    """Add what a line says; False: it is not one of ours."""
    try:
        match json.loads(line):
            case {"job": str(job)}:
                content.job = job
            case {"sample": int(document), "crc32": [int(a), int(b), int(c), int(d)]}:
                content.samples[document] = (a, b, c, d)
            case {"skipped": int(document), "reason": str(reason)}:
                content.skipped[document] = reason
            case {"finished": int(shard), "blake2b": str(blake2b)}:
                content.finished[shard] = blake2b
            case _:
                return False
    except ValueError:
        return False
    return True
