"""A process that fills a directory: ``python slow_writer.py STAGED DIRECTORY PAUSE_S HOW NAME...``.

It copies the named files one after another, marked as a capture marks its directory. ``rename``
writes each under a temporary name first, ``in-place`` grows it under its own name.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def write_in_pieces(source: Path, target: Path, pause_s: float) -> None:
    content = source.read_bytes()
    third = len(content) // 3
    with target.open("wb") as file:
        for piece in (content[:third], content[third:]):
            file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            time.sleep(pause_s / 2)


def main(staged: Path, directory: Path, pause_s: float, how: str, names: list[str]) -> None:
    directory.mkdir(exist_ok=True)
    (directory / ".capture.json").touch()
    for name in names:
        target = directory / name
        if how == "rename":
            temporary = directory / f".{name}.tmp"
            write_in_pieces(staged / name, temporary, pause_s)
            temporary.replace(target)
        else:
            write_in_pieces(staged / name, target, pause_s)
    (directory / ".capture.json").unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4], sys.argv[5:])
