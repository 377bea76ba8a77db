"""Ends training when a metric of the validation stops improving."""

from __future__ import annotations

import math
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback

from eagle3.errors import ConfigError
from eagle3.names import STOP_METRICS


class EarlyStop(Callback):
    """Stops after ``patience`` validations in a row without a new best of ``metric``.

    Args:
        metric: one of :data:`eagle3.names.STOP_METRICS`.
    """

    def __init__(self, metric: str, patience: int) -> None:
        self._metric = metric
        self._patience = patience
        self._best = -math.inf
        self._waited = 0

    @property
    def stopped(self) -> bool:
        """Whether training ended by it."""
        return self._waited >= self._patience

    def on_validation_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """Count; raises ConfigError where the validation did not measure the metric."""
        if self._metric not in trainer.callback_metrics:
            measured = sorted(set(trainer.callback_metrics) & set(STOP_METRICS))
            raise ConfigError(
                f"val.early_stop={self._metric}: this validation measured "
                f"{', '.join(measured) or 'nothing to stop by'}; give one of these, or null"
            )
        value = STOP_METRICS[self._metric] * float(trainer.callback_metrics[self._metric])
        if value > self._best:
            self._best, self._waited = value, 0
            return
        self._waited += 1
        if self.stopped:
            trainer.should_stop = True
            if trainer.is_global_zero:
                print(f"early stop: {self._waited} validations without a better {self._metric}")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "waited": self._waited}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._best, self._waited = state_dict["best"], state_dict["waited"]
