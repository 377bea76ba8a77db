"""How a checkpoint reaches the disk: whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the final name and renames, so an interrupted write leaves the old file intact.

    Lightning's own writer builds the whole file in memory and stages it in the system's temporary
    directory; across file systems its final move is a copy, and a crash leaves half of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failure: OSError | None = None
        """What the disk refused in the latest save; null: it succeeded."""

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any = None,
    ) -> None:
        """Write ``path``; where the disk refuses, set :attr:`failure` and leave no trace.

        Nothing is raised then, because the other ranks wait for this one after the save.
        """
        target = Path(path)
        temporary = target.with_name(f".{target.name}.tmp")
        self.failure = None
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _write(checkpoint, temporary)
            temporary.replace(target)
            _sync_directory(target.parent)
        except (OSError, RuntimeError) as error:
            self.failure = _disk_error(error)
        finally:
            temporary.unlink(missing_ok=True)


def remove_leftovers(directory: Path) -> None:
    """Delete what a writer that was killed has left in ``directory``."""
    for temporary in directory.glob(".*.ckpt.tmp"):
        temporary.unlink()


def _write(checkpoint: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    """Put the new name on the disk too, or a power cut could bring the old one back."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _disk_error(error: OSError | RuntimeError) -> OSError:
    """The error of the disk, which torch's writer may hide behind one of its own."""
    if isinstance(error, OSError):
        return error
    if isinstance(error.__context__, OSError):
        return error.__context__
    raise error
