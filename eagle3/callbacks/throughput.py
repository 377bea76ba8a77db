"""Speed of training: tokens per second, waiting for data, memory, and the time that is left.

One Lightning batch is one optimizer step. A step lasts from the end of the one before to its own
end, the wait for its data included and validation left out. In the steps that are logged the ranks
compare themselves: who waits for data, and how unequal their own work is.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from eagle3.callbacks.data_wait import DataWaitAlarm, RecentWaiting, Waiting
from eagle3.callbacks.rank_times import OwnTime, gather, rank_skew, several_ranks
from eagle3.data.batch import Window

_RECENT_STEPS = 100


@dataclass(frozen=True)
class StepTiming:
    """One optimizer step."""

    seconds: float
    """From the end of the step before to the end of this one."""
    wait_s: float
    """Part of it spent waiting for data, on this rank."""
    read_bytes: int
    """Bytes of hidden states read for it, on this rank."""
    rows: int
    """Real rows over all ranks."""
    supervised: int
    """Rows with a loss over all ranks."""


class Meter:
    """Rates over the recent steps; sums first, then one division, so slow steps weigh fully."""

    def __init__(self, window: int = _RECENT_STEPS) -> None:
        self._recent: deque[StepTiming] = deque(maxlen=window)

    def add(self, step: StepTiming) -> None:
        self._recent.append(step)

    @property
    def step_s(self) -> float:
        """Mean seconds of a recent step; 0 before the first."""
        return self._seconds / len(self._recent) if self._recent else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Real rows per second over all ranks."""
        return self._per_second_of(lambda step: step.rows)

    @property
    def supervised_tokens_per_s(self) -> float:
        return self._per_second_of(lambda step: step.supervised)

    @property
    def data_wait_frac(self) -> float:
        """Share of the time spent waiting for data, 0 to 1."""
        return min(1.0, self._per_second_of(lambda step: step.wait_s))

    @property
    def read_gb_per_s(self) -> float:
        """GB (1e9 bytes) of hidden states per second, on this rank."""
        return self._per_second_of(lambda step: step.read_bytes) / 1e9

    @property
    def step_s_p95(self) -> float:
        """Seconds that 95 % of the recent steps stay within."""
        seconds = sorted(step.seconds for step in self._recent)
        return seconds[min(len(seconds) - 1, int(0.95 * len(seconds)))] if seconds else 0.0

    @property
    def _seconds(self) -> float:
        return sum(step.seconds for step in self._recent)

    def _per_second_of(self, value: Callable[[StepTiming], float]) -> float:
        seconds = self._seconds
        return sum(value(step) for step in self._recent) / seconds if seconds > 0 else 0.0


class Throughput(Callback):
    """Logs ``perf/*`` and the axes beside the optimizer step, and keeps the :class:`Meter`.

    Warns when training waits for data, see :class:`DataWaitAlarm`.

    Args:
        total_steps: optimizer steps of the whole run.
        steps_per_epoch: optimizer steps of one epoch.
        clock: seconds from any origin, never running backwards.
        warn: told on rank 0 when training waits for data.
    """

    def __init__(
        self,
        total_steps: int,
        steps_per_epoch: int,
        clock: Callable[[], float] = time.monotonic,
        warn: Callable[[str], None] = print,
    ) -> None:
        self.total_steps = total_steps
        self.steps_per_epoch = steps_per_epoch
        self.meter = Meter()
        self.supervised_tokens = 0
        self.steps_done = 0
        self._clock = clock
        self._warn = warn
        self._mark = 0.0
        self._waiting = RecentWaiting()
        self._alarm = DataWaitAlarm()
        self._own_time = OwnTime(clock)

    @property
    def eta_s(self) -> float:
        """Seconds of training left at the present speed; validation is not counted."""
        return max(0, self.total_steps - self.steps_done) * self.meter.step_s

    @property
    def epoch(self) -> float:
        """Epochs done, with the fraction of the present one."""
        return self.steps_done / self.steps_per_epoch

    def on_train_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        self._mark = self._clock()

    def on_train_batch_start(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        batch: Window,
        batch_idx: int,
    ) -> None:
        if _is_logged(trainer) and several_ranks():
            self._own_time.start(trainer.strategy.root_device)

    def on_before_backward(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, loss: Tensor
    ) -> None:
        self._own_time.backward_begins(trainer.strategy.root_device)

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Mapping[str, Any],  # type: ignore[override]
        batch: Window,
        batch_idx: int,
    ) -> None:
        now = self._clock()
        step = StepTiming(
            seconds=now - self._mark,
            wait_s=batch.wait_s,
            read_bytes=batch.read_bytes,
            rows=outputs["rows"],
            supervised=outputs["supervised"],
        )
        self._mark = now
        self.meter.add(step)
        self.steps_done += 1
        self.supervised_tokens += step.supervised
        if batch_idx > 0:  # the first window of an epoch is always waited for
            rows = step.rows / trainer.world_size
            self._waiting.add(Waiting(step.seconds, step.wait_s, step.read_bytes, rows))
        values = self._values(trainer)
        if _is_logged(trainer):
            values |= self._compare_ranks(trainer)
        pl_module.log_dict(values)

    def on_validation_epoch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        if not trainer.sanity_checking:
            pl_module.log("step", float(trainer.global_step))

    def on_validation_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        self._mark = self._clock()

    def state_dict(self) -> dict[str, int]:
        return {"supervised_tokens": self.supervised_tokens, "steps_done": self.steps_done}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.supervised_tokens = state_dict["supervised_tokens"]
        self.steps_done = state_dict["steps_done"]

    def _compare_ranks(self, trainer: lightning.Trainer) -> dict[str, float]:
        """Warn where a rank waits for data; the skew of the ranks where there are several."""
        self._own_time.stop()
        recent = self._waiting.total()
        own = [self._own_time.seconds, *vars(recent).values()]
        own_s, *ranks = gather(own, trainer.strategy.root_device).T
        waiting = [Waiting(*values) for values in torch.stack(ranks, dim=1).tolist()]
        worst = max(range(len(waiting)), key=lambda rank: waiting[rank].share)
        warning = self._alarm.judge(worst, waiting[worst])
        if warning is not None and trainer.is_global_zero:
            self._warn(warning)
        return {"perf/rank_skew": rank_skew(own_s)} if several_ranks() else {}

    def _values(self, trainer: lightning.Trainer) -> dict[str, float]:
        meter = self.meter
        return {
            # Lightning takes "step" for the x-axis; its own counter runs one behind
            "step": float(trainer.global_step),
            "trainer/epoch": self.epoch,
            "trainer/supervised_tokens": float(self.supervised_tokens),
            "perf/tokens_per_s": meter.tokens_per_s,
            "perf/supervised_tokens_per_s": meter.supervised_tokens_per_s,
            "perf/data_wait_frac": meter.data_wait_frac,
            "perf/read_GBps": meter.read_gb_per_s,
            "perf/step_s_p95": meter.step_s_p95,
            "perf/mem_GiB": peak_memory_gib(trainer.strategy.root_device),
            "perf/eta_h": self.eta_s / 3600,
        }


def _is_logged(trainer: lightning.Trainer) -> bool:
    """Whether Lightning writes the figures of this step; the same on every rank."""
    return (trainer.fit_loop.epoch_loop.total_batch_idx + 1) % trainer.log_every_n_steps == 0  # type: ignore[attr-defined]


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory in GiB: allocated on the card, or resident in this process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
