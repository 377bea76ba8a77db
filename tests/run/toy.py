"""A two-parameter module under manual optimisation: the shape of a run, none of its weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from torch.utils.data import DataLoader

from eagle3.callbacks import AtomicCheckpointIO
from eagle3.data.batch import Window

STEPS_PER_EPOCH = 4


def windows(count: int) -> DataLoader[Window]:
    """Empty windows that pretend to have been waited for."""
    given = [Window((), step, wait_s=0.25, read_bytes=1_000_000) for step in range(count)]
    return DataLoader(given, batch_size=None)  # type: ignore[arg-type]


class ToyData(lightning.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Window]:
        return windows(STEPS_PER_EPOCH)

    def val_dataloader(self) -> DataLoader[Window]:
        return windows(1)


class ToyModule(lightning.LightningModule):
    """Scores of successive validations are given; a step may raise."""

    def __init__(self, scores: Sequence[float], raise_at: int | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer = torch.nn.Linear(2, 1)
        self.scores = iter(scores)
        self.raise_at = raise_at
        self.wishes: Sequence[Callable[[], bool]] = ()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: Window, batch_idx: int) -> dict[str, Any]:
        if self.global_step == self.raise_at:
            raise RuntimeError("a step went wrong")
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        loss = self.layer(torch.ones(2)).square().sum()
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        self.log("train/loss", loss)
        wanted = [wish() for wish in self.wishes]
        return {
            "loss": loss,
            "accuracy": 0.25,
            "rows": 100,
            "supervised": 60,
            "wanted": wanted,
            "grad_norm": 1.0,
        }

    def validation_step(self, batch: Window, batch_idx: int) -> None:
        pass

    def on_validation_epoch_end(self) -> None:
        self.log_dict({"val/acceptance_replay": next(self.scores), "val/accuracy": 0.5})


def train_toy(
    folder: Path,
    module: ToyModule,
    *,
    callbacks: list[Callback],
    loggers: list[Logger] | None = None,
    epochs: int = 3,
    max_steps: int = -1,
    resume: Path | None = None,
) -> None:
    """Train on CPU without any output of Lightning's own."""
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        max_steps=max_steps,
        logger=loggers or False,
        callbacks=callbacks,
        plugins=[AtomicCheckpointIO()],
        default_root_dir=folder,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, datamodule=ToyData(), ckpt_path=resume, weights_only=True)
