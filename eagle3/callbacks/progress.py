"""What the terminal shows: one line rewritten in place, or plain lines in a log file.

On a terminal the line is rewritten a few times a second. Anywhere else (a pipe, nohup) a whole line
is written at the first steps and then about every ten seconds, so a log stays short and readable.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import lightning
from lightning.pytorch.callbacks import Callback

from eagle3.callbacks.throughput import Throughput

_FIRST_STEPS = 3
_LOG_EVERY_S = 10.0
_REWRITE_EVERY_S = 0.2
_CLEAR_LINE = "\r\033[K"


class Progress(Callback):
    """Prints progress on global rank 0. Comes after ``throughput`` in the callback list.

    Args:
        throughput: its speed and counts are shown.
        epochs: epochs of the whole run.
        stream: where to print; a terminal is recognised by ``isatty``.
        clock: seconds from any origin, never running backwards.
    """

    def __init__(
        self,
        throughput: Throughput,
        epochs: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._throughput = throughput
        self._epochs = epochs
        self._stream = stream or sys.stdout
        self._clock = clock
        self._on_terminal = self._stream.isatty()
        self._last_print = float("-inf")
        self._line_open = False

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Mapping[str, Any],  # type: ignore[override]
        batch: Any,
        batch_idx: int,
    ) -> None:
        if not trainer.is_global_zero or not self._due():
            return
        self._last_print = self._clock()
        line = training_line(
            self._throughput,
            epochs=self._epochs,
            loss=float(outputs["loss"]),
            accuracy=outputs["accuracy"],
        )
        if self._on_terminal:
            width = shutil.get_terminal_size().columns
            self._write(_CLEAR_LINE + line[: width - 1])
            self._line_open = True
        else:
            self._write(line + "\n")

    def on_validation_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        if trainer.is_global_zero and not trainer.sanity_checking:
            values = {name: float(value) for name, value in trainer.callback_metrics.items()}
            self._close_line()
            self._write(validation_line(self._throughput, values) + "\n")

    def on_train_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        self._close_line()

    def on_exception(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        exception: BaseException,
    ) -> None:
        self._close_line()

    def _due(self) -> bool:
        since = self._clock() - self._last_print
        if self._on_terminal:
            return since >= _REWRITE_EVERY_S
        done = self._throughput.steps_done
        last = done >= self._throughput.total_steps
        return done <= _FIRST_STEPS or last or since >= _LOG_EVERY_S

    def _close_line(self) -> None:
        if self._line_open:
            self._write("\n")
            self._line_open = False

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def training_line(throughput: Throughput, *, epochs: int, loss: float, accuracy: float) -> str:
    """``step 120/1000 epoch 1/5 loss 2.31 acc .320 | 1.2k tok/s | data wait 2% | ETA 3m10s``."""
    meter = throughput.meter
    done = throughput.steps_done
    epoch = min(epochs, (done - 1) // throughput.steps_per_epoch + 1)
    return (
        f"step {done}/{throughput.total_steps} epoch {epoch}/{epochs} "
        f"loss {loss:.3g} acc {share(accuracy)} | {thousands(meter.tokens_per_s)} tok/s "
        f"| data wait {meter.data_wait_frac:.0%} | ETA {duration(throughput.eta_s)}"
    )


def validation_line(throughput: Throughput, values: Mapping[str, float]) -> str:
    """One line with what was measured at this validation; what was not logged is left out."""
    shown = [f"validation at step {throughput.steps_done}:"]
    for name, text in (
        ("val/acceptance_replay", "acceptance {:.3f} tokens per verifier pass"),
        ("val/accuracy", "acc {}"),
        ("val/loss", "loss {:.3g}"),
    ):
        value = values.get(name, math.nan)
        if math.isfinite(value):
            shown.append(text.format(share(value) if name == "val/accuracy" else value))
    return " ".join(shown)


def share(value: float) -> str:
    """Three digits of a share between 0 and 1, without the leading zero."""
    return f"{value:.3f}".removeprefix("0")


def thousands(value: float) -> str:
    """Three significant digits with a unit: 950, 1.2k, 45.3k, 1.20M."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """The two largest units: 42s, 3m10s, 5h03m, 2d04h."""
    whole = round(seconds)
    for big, size, small, step in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "m", 60),
        ("m", 60, "s", 1),
    ):
        if whole >= size:
            return f"{whole // size}{big}{whole % size // step:02d}{small}"
    return f"{whole}s"
