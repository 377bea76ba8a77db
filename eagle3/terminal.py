"""How an entry point speaks: lines at once, one message an error, an exit code that means it."""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback

from eagle3.errors import ConfigError, UserError


class JobFailedError(Exception):
    """A job whose error is already on the terminal; only its exit code is left to pass on."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


def print_lines_at_once() -> None:
    """Under nohup or in a pipe Python would keep lines back until some kilobytes have gathered."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def report_error(error: Exception) -> int:
    """Print ``error`` as an entry point does and return the exit code it means."""
    if isinstance(error, JobFailedError):
        return error.code
    sys.stdout.flush()
    rank = os.environ.get("RANK", "0")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        place = f" at {error.filename}" if error.filename else ""
        print(
            f"error: no space is left on the disk{place}: free some, or give paths.output or "
            "paths.cache on another disk; what was complete is kept",
            file=sys.stderr,
            flush=True,
        )
        return 1
    if not isinstance(error, UserError):
        traceback.print_exception(error)
        return 1
    if isinstance(error, ConfigError) and rank != "0":
        return 2  # every rank finds the same mistake in the same configuration: rank 0 says it
    where = "" if rank == "0" else f"[rank {rank}] "
    print(f"{where}error: {error}", file=sys.stderr, flush=True)
    return 2
