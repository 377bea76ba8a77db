"""Answers that the verifier has written so far: one line each, appended as they come.

A line that was cut by a crash is dropped, and its answer is written again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from eagle3.data.disk import write_error
from eagle3.errors import DataError

Key = tuple[int, int]
"""Place of the conversation, and of the answer among its messages."""


class Responses:
    """The file, open for appending. Use as a context manager."""

    def __init__(self, path: Path, job: str) -> None:
        """Make it if missing, and read it.

        Args:
            path: In a directory that only this process writes.
            job: Name of the input and the settings.

        Raises:
            DataError: it belongs to another job, or cannot be read or written.
        """
        self.path = path
        self.found: dict[Key, tuple[int, ...]] = {}
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._read(job)
        except OSError as error:
            raise write_error(path, error, 0) from error

    def __enter__(self) -> Responses:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def add(self, answers: Iterable[tuple[Key, tuple[int, ...]]]) -> None:
        """Append a batch of answers, and wait until the disk has them.

        Raises:
            DataError: the disk is full or refuses.
        """
        lines = [{"conversation": key[0], "message": key[1], "ids": ids} for key, ids in answers]
        self._append(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        for line in lines:
            self._take(line)

    def _read(self, job: str) -> None:
        whole, first = 0, True
        with open(self._file, "rb", closefd=False) as file:
            for raw in file:
                try:
                    line = json.loads(raw) if raw.endswith(b"\n") else None
                except ValueError:
                    line = None
                if not isinstance(line, dict):
                    break
                if first:
                    self._check_job(line.get("job"), job)
                else:
                    self._take(line)
                whole, first = whole + len(raw), False
        os.ftruncate(self._file, whole)
        if first:
            self._append(json.dumps({"job": job}).encode() + b"\n")

    def _take(self, line: dict[str, object]) -> None:
        match line:
            case {"conversation": int(place), "message": int(message), "ids": [*ids]}:
                self.found[place, message] = tuple(int(number) for number in ids)  # type: ignore[call-overload]
            case _:
                raise DataError(
                    f"{self.path}: found {line!r:.80}, expected an answer with conversation, "
                    "message and ids. The file was edited or is damaged: remove it, and the "
                    "answers are written again."
                )

    def _append(self, content: bytes) -> None:
        try:
            done = 0
            while done < len(content):
                done += os.write(self._file, content[done:])
            os.fsync(self._file)
        except OSError as error:
            raise write_error(self.path, error, len(content)) from error

    def _check_job(self, found: object, job: str) -> None:
        if found != job:
            raise DataError(
                f"{self.path}: found answers of another capture ({found}), expected those of this "
                f"one ({job}): the prompts or the settings were changed. Choose another out=, or "
                "remove this directory."
            )
