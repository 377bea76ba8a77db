"""Log lines of the package as people read them beside the output of a run."""

from __future__ import annotations

import logging
import sys


class _Lines(logging.Formatter):
    """The message; in front of it the level, where it is a warning or worse."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        quiet = record.levelno < logging.WARNING
        return text if quiet else f"{record.levelname.lower()}: {text}"


def show_log_lines() -> None:
    """Print what the package logs, progress included; for the rank that speaks."""
    package = logging.getLogger("eagle3")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_Lines("%(message)s"))
    package.handlers = [handler]
    package.propagate = False
    package.setLevel(logging.INFO)
