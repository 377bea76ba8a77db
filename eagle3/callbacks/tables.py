"""Tables beside the curves: example rounds after each validation; once: parameters, preflight."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import lightning
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import WandbLogger

from eagle3.examples import table
from eagle3.model.build import ParameterRow
from eagle3.module import DrafterModule
from eagle3.preflighting.report import COLUMNS, Report
from eagle3.token_text import Decode

EXAMPLES_FILE = "examples.csv"


class Tables(Callback):
    """Writes ``examples.csv`` (the latest validation's) and, where W&B runs, all tables there."""

    def __init__(
        self, run_dir: Path, decode: Decode, parameters: Sequence[ParameterRow], startup: Report
    ) -> None:
        self._path = run_dir / EXAMPLES_FILE
        self._decode = decode
        self._parameters = parameters
        self._startup = startup

    def on_train_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        columns = ["parameter", "shape", "count", "dtype", "trainable", "source"]
        rows: list[list[str | int]] = [
            [r.name, "x".join(map(str, r.shape)), r.count, r.dtype, str(r.trainable), r.source]
            for r in self._parameters
        ]
        self._to_wandb(trainer, "params", columns, rows)
        if found := self._startup.rows():  # nothing with preflight=off
            self._to_wandb(trainer, "preflight", list(COLUMNS), found)

    def on_validation_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        assert isinstance(pl_module, DrafterModule)
        if not trainer.is_global_zero or not pl_module.examples:
            return
        columns, rows = table(pl_module.examples, self._decode)
        with self._path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(rows)
        self._to_wandb(trainer, "val/examples", columns, rows)

    def _to_wandb(
        self,
        trainer: lightning.Trainer,
        key: str,
        columns: list[str],
        rows: Sequence[Sequence[str | int]],
    ) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_table(
                    key, columns=columns, data=[list(row) for row in rows], step=trainer.global_step
                )
