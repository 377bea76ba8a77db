"""Directories that fill up, and the process that fills them."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eagle3.data.growing import Patience
from tests.data import slow_writer

QUICK = Patience(poll_s=0.01, stall_s=10, timeout_s=30)
IMPATIENT = Patience(poll_s=0.01, stall_s=0.2, timeout_s=0.4)
SOON_STALLED = Patience(poll_s=0.01, stall_s=0.2, timeout_s=30)
ORDER = [3, 0, 5, 1, 4, 7, 2, 6]
"""In which a writer makes the eight files."""


@contextmanager
def writer_process(
    staged: Path, directory: Path, pause_s: float = 0.05, how: str = "rename"
) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that writes eight files of ``staged``, ended at the latest when the block ends."""
    names = [f"data_{i}.pt" for i in ORDER]
    arguments = [slow_writer.__file__, str(staged), str(directory), str(pause_s), how, *names]
    with subprocess.Popen([sys.executable, *arguments]) as process:
        try:
            while not (directory / ".capture.json").exists():
                assert process.poll() is None
                time.sleep(0.01)
            yield process
        finally:
            process.kill()


def fill(staged: Path, directory: Path) -> None:
    """All eight files at once, in numeric order."""
    slow_writer.main(staged, directory, 0.0, "rename", [f"data_{i}.pt" for i in range(8)])


def begin(directory: Path, *files: Path) -> None:
    """Mark a directory as a running capture does, and put the first files there."""
    directory.mkdir()
    (directory / ".capture.json").touch()
    for file in files:
        (directory / file.name).write_bytes(file.read_bytes())
