"""Which checkpoints are kept, and when they are taken.

A checkpoint is taken between two optimizer steps, after everything that belongs to the first: its
row in ``metrics.csv``, and its validation if it has one::

    step n | row of n | validation, its row | CHECKPOINT | step n + 1 ...

So a run that goes on from it neither repeats nor leaves out any of them. File names carry no ``=``
(it would break command-line overrides): ``best.ckpt`` and ``step00001000.ckpt``.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback

from eagle3.callbacks.checkpoint_io import AtomicCheckpointIO, remove_leftovers
from eagle3.callbacks.stop_signals import StopSignals
from eagle3.errors import TrainingError
from eagle3.planning.saving import SAVING_SHARE, pause_s

MONITOR = "val/acceptance_replay"
BEST_FILE = "best.ckpt"
_TRIES = 3
"""Saves in a row that may fail before the run stops."""


class CheckpointPolicy(Callback):
    """Saves every so many steps or minutes, at epoch ends, at the end, at a stop signal, the best.

    Comes first in the callback list, so that no other callback times a save. The module asks its
    ``wishes`` after each step and reports as ``outputs["wanted"]`` what any rank answered.

    Args:
        directory: made if missing; holds at most ``keep_last`` + 1 checkpoints.
        every_steps: optimizer steps between checkpoints; null: none by steps.
        every_minutes: by the clock of rank 0; null: none by time. Where the last save took so long
            that this would be more than 2 % of the time, :func:`pause_s` instead.
        keep_last: newest checkpoints that are kept beside the best.
        signals: taken over in training (Lightning gives them back at its end).
        logged_rows: rows of ``metrics.csv`` so far.
        clock: seconds from any origin, never running backwards.
    """

    def __init__(
        self,
        directory: Path,
        *,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        keep_last: int = 2,
        signals: StopSignals | None = None,
        logged_rows: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.best_value: float | None = None
        self.best_step: int | None = None
        self.best_path: Path | None = None
        self._directory = directory
        self._every_steps = every_steps
        self._every_s = math.inf if every_minutes is None else 60 * every_minutes
        self._keep_last = keep_last
        self._logged_rows = logged_rows
        self._clock = clock
        self._saved_at = clock()
        self._save_s = 0.0
        self._told_of_pause = False
        self._signals = signals or StopSignals()
        self._due = self._stop = self._cut = False
        self._candidate: float | None = None
        self._failures = 0

    def setup(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str
    ) -> None:
        pl_module.wishes = (  # type: ignore[assignment]
            lambda: self._signals.received is not None,
            lambda: trainer.is_global_zero and self._time_is_up(),
        )
        if trainer.is_global_zero:
            remove_leftovers(self._directory)

    def on_train_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        self._saved_at = self._clock()
        # After Lightning has put its own handlers there: they would wait for the other ranks.
        self._signals.install()

    def on_train_batch_start(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """The step before is complete now."""
        self._between_steps(trainer)

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Mapping[str, Any],  # type: ignore[override]
        batch: Any,
        batch_idx: int,
    ) -> None:
        stop, time_is_up = outputs["wanted"]
        done = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        regular = self._every_steps is not None and done % self._every_steps == 0
        self._stop |= stop
        self._due |= stop or time_is_up or regular

    def on_validation_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        value = float(trainer.callback_metrics.get(MONITOR, math.nan))
        if value > (-math.inf if self.best_value is None else self.best_value):
            self._candidate = value

    def on_train_epoch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """The epoch's last step is complete, or the run's where it ends within an epoch."""
        self._due, self._cut = True, not trainer.is_last_batch
        self._between_steps(trainer)

    def on_save_checkpoint(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        checkpoint: dict[str, Any],
    ) -> None:
        _between_batches(checkpoint["loops"]["fit_loop"], epoch_cut=self._cut)

    def state_dict(self) -> dict[str, Any]:
        return {
            "best_value": self.best_value,
            "best_step": self.best_step,
            "best_path": None if self.best_path is None else str(self.best_path),
            "rows": self._logged_rows(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the best so far, as long as its file is there, here or where it was."""
        if state_dict["best_path"] is None:
            return
        for path in (self._directory / BEST_FILE, Path(state_dict["best_path"])):
            if path.is_file():
                self.best_value, self.best_step = state_dict["best_value"], state_dict["best_step"]
                self.best_path = path
                return

    def newest(self) -> Path | None:
        """The last checkpoint that was taken within the run; null: there is none."""
        return max(self._directory.glob("step*.ckpt"), default=None)

    def _between_steps(self, trainer: lightning.Trainer) -> None:
        """Save what is due: the best first, whose value the other then tells.

        Raises:
            SystemExit: with EX_TEMPFAIL, after a stop signal to any rank.
            TrainingError: no save succeeded for three times in a row.
        """
        if self._candidate is not None:
            self._save_best(trainer, self._candidate)
            self._candidate = None
        if self._due:
            if self._save(trainer, self._directory / step_file(trainer.global_step)):
                self._prune(trainer)
            self._saved_at = self._clock()
            self._due = False
            self._tell_of_pause(trainer)
        if self._stop:
            raise SystemExit(os.EX_TEMPFAIL)

    def _time_is_up(self) -> bool:
        return self._clock() - self._saved_at >= pause_s(self._every_s, self._save_s)

    def _tell_of_pause(self, trainer: lightning.Trainer) -> None:
        """Once: the disk is too slow for the interval that was asked for."""
        pause = pause_s(self._every_s, self._save_s)
        if self._told_of_pause or pause <= self._every_s or not trainer.is_global_zero:
            return
        self._told_of_pause = True
        print(
            f"note: a save took {self._save_s:.1f} s, so the next by time comes after "
            f"{pause / 60:.1f} min instead of trainer.checkpoint_every_minutes="
            f"{self._every_s / 60:g}: saves by time take at most {SAVING_SHARE:.0%} of a run",
            flush=True,
        )

    def _save_best(self, trainer: lightning.Trainer, value: float) -> None:
        before = self.best_value, self.best_step, self.best_path
        path = self._directory / BEST_FILE
        self.best_value, self.best_step, self.best_path = value, trainer.global_step, path
        if not self._save(trainer, path):
            self.best_value, self.best_step, self.best_path = before

    def _save(self, trainer: lightning.Trainer, path: Path) -> bool:
        """Whether it succeeded, the same on every rank."""
        writer = trainer.strategy.checkpoint_io
        assert isinstance(writer, AtomicCheckpointIO)
        began = self._clock()
        trainer.save_checkpoint(path)
        failure = writer.failure
        reason = trainer.strategy.broadcast(None if failure is None else failure.strerror)
        if failure is None and reason is None:
            self._failures = 0
            self._save_s = self._clock() - began
            return True
        self._failures += 1
        text = f"{path} could not be written ({reason}); free space on its disk"
        if self._failures >= _TRIES:
            raise TrainingError(
                f"{text} and go on with resume=auto: {self._failures} saves failed in a row"
            )
        if trainer.is_global_zero:
            print(f"warning: {text}. Training goes on, earlier checkpoints are whole", flush=True)
        return False

    def _prune(self, trainer: lightning.Trainer) -> None:
        """Delete what is old, and what lies ahead: a run that went on before it has left it."""
        if not trainer.is_global_zero:
            return
        present = step_file(trainer.global_step)
        files = sorted(self._directory.glob("step*.ckpt"))
        kept = [path for path in files if path.name <= present][-self._keep_last :]
        for path in set(files) - set(kept):
            path.unlink()


def step_file(step: int) -> str:
    """Name of the checkpoint after ``step`` optimizer steps; names sort as steps do."""
    return f"step{step:08d}.ckpt"


def _between_batches(fit_loop: dict[str, Any], *, epoch_cut: bool) -> None:
    """Make Lightning's counters say that as many batches are done as were begun.

    It counts a batch as begun, and maybe as the epoch's last, before the hook that we save in; and
    an epoch as processed, also when training ends within it (``epoch_cut``).
    """
    batches = fit_loop["epoch_loop.batch_progress"]
    if batches["current"]["ready"] > batches["current"]["completed"]:
        batches["is_last_batch"] = False
    for counts in (batches["total"], batches["current"]):
        for stage in ("ready", "started", "processed"):
            counts[stage] = counts["completed"]
    if epoch_cut:
        for counts in fit_loop["epoch_progress"].values():
            counts["processed"] = counts["completed"]
