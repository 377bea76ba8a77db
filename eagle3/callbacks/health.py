"""What a run watches about itself: it says early what would otherwise be found in the morning.

Everything here runs on rank 0 and changes nothing of what is trained.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback

from eagle3.callbacks.checkpoints import MONITOR
from eagle3.callbacks.health_alerts import AlertKind, Alerts
from eagle3.callbacks.health_judges import DiskRoom, FallingAcceptance, GradientNorms
from eagle3.callbacks.health_watch import HealthWatch, Standing
from eagle3.callbacks.throughput import Throughput
from eagle3.config import HealthConfig
from eagle3.run_folder import checkpoints


class Health(Callback):
    """Heartbeat, standstill, non-finite steps, gradient outliers, falling acceptance, disk.

    Comes after ``throughput`` in the callback list.

    Args:
        clip_norm: what gradients are clipped to, for the text of a warning.
        throughput: its counts and its estimate of the time left are shown.
    """

    def __init__(
        self,
        config: HealthConfig,
        run_dir: Path,
        throughput: Throughput,
        alerts: Alerts,
        *,
        clip_norm: float,
    ) -> None:
        self._run_dir = run_dir
        self._throughput = throughput
        self._alerts = alerts
        self._clip_norm = clip_norm
        self._norms = GradientNorms(config.grad_norm_factor)
        self._acceptance = FallingAcceptance()
        self._room = DiskRoom()
        self._watch = HealthWatch(
            run_dir,
            alerts,
            stall_s=60 * config.stall_minutes,
            every_s=config.heartbeat_s,
            also=self._look_at_disk,
        )

    def on_fit_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        if trainer.is_global_zero:
            self._watch.start(self._standing(trainer))

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Mapping[str, Any],  # type: ignore[override]
        batch: Any,
        batch_idx: int,
    ) -> None:
        if not trainer.is_global_zero:
            return
        step, loss, norm = trainer.global_step, float(outputs["loss"]), outputs["grad_norm"]
        self._watch.sign(self._standing(trainer, loss))
        if not math.isfinite(loss + norm):
            text = f"warning: loss {loss:g} and gradient norm {norm:g} after step {step}: left out"
            self._alerts.send(AlertKind.non_finite, text, printed=True)  # the module says it
            return
        warning = self._norms.judge(step, norm, self._clip_norm)
        if warning is not None:
            self._alerts.send(AlertKind.gradient_norm, warning)

    def on_validation_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._watch.sign()

    def on_validation_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        warning = self._acceptance.judge(float(trainer.callback_metrics.get(MONITOR, math.nan)))
        if warning is not None and trainer.is_global_zero:
            self._alerts.send(AlertKind.acceptance, warning)

    def on_exception(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        exception: BaseException,
    ) -> None:
        self._watch.stop()

    def teardown(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str
    ) -> None:
        self._watch.stop()

    def state_dict(self) -> dict[str, Any]:
        return {"acceptance": self._acceptance.values}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._acceptance = FallingAcceptance(state_dict["acceptance"])

    def _standing(self, trainer: lightning.Trainer, loss: float | None = None) -> Standing:
        speed = self._throughput
        return Standing(
            step=trainer.global_step,
            total_steps=speed.total_steps,
            epoch=round(speed.epoch, 4),
            loss=loss,
            eta_s=None if loss is None else round(speed.eta_s, 1),
        )

    def _look_at_disk(self) -> None:
        with contextlib.suppress(OSError):  # a file that was deleted while it was looked at
            saved = [path.stat() for path in checkpoints(self._run_dir).glob("*.ckpt")]
            if not saved:
                return
            newest = max(saved, key=lambda stat: stat.st_mtime_ns)
            free = shutil.disk_usage(self._run_dir).free
            warning = self._room.judge(free, newest.st_size, str(self._run_dir))
            if warning is not None:
                self._alerts.send(AlertKind.disk, warning)
