"""When validation runs: at the end of every epoch, every so many steps, and at the last step."""

from __future__ import annotations

from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback


class ValidationSchedule(Callback):
    """Decides after each optimizer step whether validation follows.

    Lightning's own ``val_check_interval`` counts within an epoch, leaves out the epoch's end when
    the interval does not divide it, and validates never when ``max_steps`` cuts the first epoch.

    Args:
        every_steps: optimizer steps between validations; null: at the ends only.
        total_steps: optimizer steps of the whole run.
    """

    def __init__(self, every_steps: int | None, total_steps: int) -> None:
        self._every_steps = every_steps
        self._total_steps = total_steps

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        done = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        regular = self._every_steps is not None and done % self._every_steps == 0
        due = regular or trainer.is_last_batch or done == self._total_steps
        # Lightning validates when this divides the number of batches done in the epoch
        trainer.val_check_batch = batch_idx + 1 if due else batch_idx + 2
