"""Which checkpoints are kept, and how they reach the disk.

Kept are the best by validation, the last at an epoch's end, and if wanted the last within an epoch.
File names carry no ``=`` (it would
break command-line overrides): ``best.ckpt`` and ``step00001000.ckpt``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint

MONITOR = "val/acceptance_replay"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the final name and renames, so an interrupted write leaves the old file intact.

    Lightning's own writer builds the whole file in memory and stages it in the system's temporary
    directory; across file systems its final move is a copy, and a crash leaves half of it.
    """

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any = None,
    ) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.tmp")
        with temporary.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)


def checkpoint_callbacks(directory: Path, every_steps: int | None = None) -> list[ModelCheckpoint]:
    """Best on ``val/acceptance_replay`` (saved after validation), then the last of each epoch, then
    the last at a multiple of ``every_steps`` optimizer steps.

    Args:
        directory: made if missing; holds at most these files.
        every_steps: optimizer steps between checkpoints within an epoch; None: none.
    """
    best = ModelCheckpoint(
        dirpath=directory,
        filename="best",
        monitor=MONITOR,
        mode="max",
        save_top_k=1,
        save_on_train_epoch_end=False,  # in on_validation_end, with the value just measured
        enable_version_counter=False,
        auto_insert_metric_name=False,
    )
    last = ModelCheckpoint(
        dirpath=directory,
        filename="step{step:08d}",
        save_top_k=1,
        every_n_epochs=1,
        save_on_train_epoch_end=True,
        enable_version_counter=False,
        auto_insert_metric_name=False,
    )
    if every_steps is None:
        return [best, last]
    recent = ModelCheckpoint(
        dirpath=directory,
        filename="recent{step:08d}",
        save_top_k=1,
        every_n_train_steps=every_steps,
        save_on_train_epoch_end=False,
        enable_version_counter=False,
        auto_insert_metric_name=False,
    )
    return [best, last, recent]
