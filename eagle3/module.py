"""LightningModule: wires drafter, objective, optimizer and metrics; computes nothing itself.

One Lightning batch is one optimizer window, so every step counter counts optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor

from eagle3.compilation import CompileLog, compile_layer
from eagle3.config import Config
from eagle3.data.batch import PackedBatch, Window
from eagle3.errors import ConfigError, TrainingError
from eagle3.examples import Example, pick_examples
from eagle3.metrics import AcceptanceMetrics
from eagle3.model.drafter import Drafter
from eagle3.model.noise import noisy
from eagle3.model.verifier_head import VerifierHead
from eagle3.names import Compile, OptimizerName
from eagle3.objective import StepResult, row_counts, run_pack, step_weights
from eagle3.optim import LrSchedule, PullToStart, build_optimizer, update_ratio
from eagle3.sharding import ShardedStrategy, shard, whole

_UPDATE_PARTS = ("fc", "layer", "lm_head")
_MAX_SKIPPED_IN_A_ROW = 10
_COUNTERS = ("clipped_steps", "skipped_steps", "skipped_in_a_row", "bad_samples")


@dataclass(frozen=True)
class WindowCounts:
    """Global counts of one window, known before its first backward."""

    rows_by_step: Tensor
    """int64 [S]: loss rows at each TTT step, over all ranks and packs."""
    rows: int
    """Rows laid into packs, context and look-ahead included."""
    bad_samples: int
    """Samples left out since the start of the run."""


class DrafterModule(lightning.LightningModule):
    """Trains a drafter against a frozen verifier head."""

    def __init__(
        self,
        config: Config,
        drafter: Drafter,
        head: VerifierHead,
        schedule: LrSchedule,
        provenance: Mapping[str, Any],
        *,
        tokens_lost: int = 0,
        sources: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.config = config
        self.drafter = drafter
        self.head = head
        self.schedule = schedule
        self.provenance = dict(provenance)
        self.tokens_lost = tokens_lost
        self.mix = [(term.name, term.weight) for term in config.loss.mix]
        self._pull: PullToStart | None = None
        if config.optim.pull_to_start > 0:  # the drafter still is as paths.init has left it
            self._pull = PullToStart(drafter, config.optim.pull_to_start)
        self._compile_log: CompileLog | None = None
        if config.compute.compile is Compile.layer:
            compile_layer(drafter.layer)
            self._compile_log = CompileLog(self.print)
        self.acceptance = AcceptanceMetrics(config.val.draft_steps, sources)
        self.examples: list[Example] = []
        self.clipped_steps = 0
        self.skipped_steps = 0
        self.skipped_in_a_row = 0
        self.bad_samples = 0
        self.wishes: Sequence[Callable[[], bool]] = ()
        """Asked on every rank after each step; ``outputs["wanted"]`` says what any rank wants."""

    def configure_model(self) -> None:
        """Share the drafter out where the strategy does; Lightning calls it before it sets up."""
        strategy = self.trainer.strategy
        if isinstance(strategy, ShardedStrategy):
            shard(self.drafter, strategy.device_mesh["data_parallel"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer(self.drafter, self.config.optim, self.config.lr)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Plain values only, so that ``torch.load(weights_only=True)`` reads the file."""
        counters = {name: int(getattr(self, name)) for name in _COUNTERS}
        # those of the latest validation; a best checkpoint is saved right after its own
        logged = self.trainer.callback_metrics.items()
        metrics = {name: float(value) for name, value in logged if name.startswith("val/")}
        checkpoint["eagle3"] = {**self.provenance, "counters": counters, "metrics": metrics}
        if self._pull is not None:
            checkpoint["eagle3"]["pulled_to"] = self._pull.digest

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on counting, but not with another optimizer, whose state the checkpoint lacks.

        Raises:
            ConfigError: names both optimizers; or the pull is towards another start.
        """
        # Checkpoints that do not say it are from before there was a choice.
        saved = checkpoint["eagle3"]["config"]["optim"].get("optimizer", OptimizerName.adamw)
        found = self.config.optim.optimizer
        if found != saved:
            raise ConfigError(
                f"optim.optimizer={found}: expected {saved}, with which "
                f"{self.trainer.ckpt_path} was trained; give optim.optimizer={saved}, or begin a "
                "new run without resume"
            )
        pulled_to = checkpoint["eagle3"].get("pulled_to")
        if self._pull is not None and pulled_to not in (None, self._pull.digest):
            raise ConfigError(
                f"paths.init={self.config.paths.init}: found weights {self._pull.digest}, expected "
                f"{pulled_to}, to which the run was pulled before: give the drafter that it began "
                "from"
            )
        for name, count in checkpoint["eagle3"].get("counters", {}).items():
            setattr(self, name, count)

    def training_step(self, window: Window, batch_idx: int) -> dict[str, Any]:
        for line in window.bad_samples:
            print(f"warning: skipped a bad sample: {line}", flush=True)
        packs = [pack.trim() for pack in window.packs]
        counts = self._global_counts(packs, len(window.bad_samples))
        sums = torch.zeros(self.config.ttt_steps + 1, device=self.device, dtype=torch.float64)
        with self._told_if_compiling():
            for index, pack in enumerate(packs):
                with self._sync_gradients_at(index == len(packs) - 1):
                    results = self._train_pack(pack, counts)
                sums += _window_sums(results)
        norm = self._update_weights(counts)
        wishes = sums.new_tensor([wish() for wish in self.wishes])
        sums, wanted = self._reduce(torch.cat((sums, wishes))).split((len(sums), len(wishes)))
        told = {"wanted": (wanted > 0).tolist(), "grad_norm": norm}
        return self._report(window, counts, sums) | told

    def _train_pack(self, pack: PackedBatch, counts: WindowCounts) -> list[StepResult]:
        config = self.config
        aux = noisy(
            pack, config.data.noise, config.noise_std, seed=config.seed, dtype=self._compute_dtype
        )
        weights = step_weights(
            counts.rows_by_step,
            step_loss_decay=config.loss.step_loss_decay,
            world_size=self.trainer.world_size,
        )
        result = run_pack(
            self.drafter,
            self.head,
            pack,
            aux,
            ttt_steps=config.ttt_steps,
            mix=self.mix,
            compute=config.compute,
            weights=weights,
        )
        self.manual_backward(result.loss)
        return result.steps

    def _update_weights(self, counts: WindowCounts) -> float:
        """Clip, step at the scheduled rate, leave out a step whose gradient is not finite.

        Returns:
            The norm of all gradients before clipping.
        """
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        limit = self.config.optim.clip_norm
        gradients = [p.grad for p in trained if p.grad is not None]
        total = whole(torch.nn.utils.get_total_norm(gradients))
        torch.nn.utils.clip_grads_with_norm_(trained, limit, total)
        norm = float(total)
        rate = self.schedule(self.global_step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        finite = norm < float("inf")
        if self._pull is not None:
            self._pull.add_to_gradients()
        if finite and int(counts.rows_by_step[0]) > 0:
            optimizer.step()
            self.clipped_steps += norm > limit
            self.skipped_in_a_row = 0
        else:
            self._skip_step(finite)
        optimizer.zero_grad(set_to_none=True)
        self.log_dict(
            {
                "optim/lr": rate,
                "optim/grad_norm": norm if finite else -1.0,
                "optim/clip_frac": self.clipped_steps / self._windows_seen,
                "optim/skipped_steps": float(self.skipped_steps),
            }
        )
        return norm

    def _skip_step(self, finite: bool) -> None:
        """Count and say it; stop when nothing but skipping happens.

        Raises:
            TrainingError: the gradient was not finite many steps in a row.
        """
        self.skipped_steps += 1
        reason = "no row has a loss" if finite else "the gradient is not finite"
        if self.skipped_in_a_row == 0:
            self.print(f"warning: optimizer step {self.global_step + 1} left out: {reason}")
        self.skipped_in_a_row += not finite
        if self.skipped_in_a_row >= _MAX_SKIPPED_IN_A_ROW:
            raise TrainingError(
                f"the gradient was not finite in {self.skipped_in_a_row} optimizer steps in a "
                f"row, the weights are those of step {self.global_step}: lower lr (it is "
                f"{self.config.lr:g}), and look at the states that these steps read"
            )

    def _report(self, window: Window, counts: WindowCounts, sums: Tensor) -> dict[str, Any]:
        """Log the window's global figures; what is returned feeds progress and throughput."""
        rows_by_step = counts.rows_by_step.clamp(min=1)
        losses = (sums[:-1] / rows_by_step).tolist()
        loss = sum(losses) / len(losses)
        supervised = int(counts.rows_by_step[0])
        accuracy = float(sums[-1]) / max(supervised, 1)
        values = {f"train/loss_step/{step}": value for step, value in enumerate(losses)}
        capacity = self.config.max_seq_len * len(window.packs) * self.trainer.world_size
        values |= {
            "train/loss": loss,
            "train/accuracy": accuracy,
            "data/pack_fill": counts.rows / capacity,
            "data/supervised_frac": supervised / max(counts.rows, 1),
            "data/bad_samples": float(counts.bad_samples),
            "data/tokens_lost": float(self.tokens_lost),
        }
        if self._windows_seen % self.config.trainer.log_every_steps == 0:
            values |= self._update_ratios()
        self.log_dict(values)
        return {
            "loss": torch.tensor(loss),
            "accuracy": accuracy,
            "rows": counts.rows,
            "supervised": supervised,
        }

    def _update_ratios(self) -> dict[str, float]:
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, torch.optim.Optimizer)
        parts = {name: getattr(self.drafter, name) for name in _UPDATE_PARTS}
        return {
            f"optim/update_ratio/{name}": float(update_ratio(optimizer, part.parameters()))
            for name, part in parts.items()
            if any(p.requires_grad for p in part.parameters())
        }

    def validation_step(self, window: Window, batch_idx: int) -> None:
        for line in window.bad_samples:
            print(f"warning: skipped a bad sample: {line}", flush=True)
        for pack in map(PackedBatch.trim, window.packs):
            results = run_pack(
                self.drafter,
                self.head,
                pack,
                pack.aux_hidden.to(self._compute_dtype),
                ttt_steps=self.config.val.draft_steps,
                mix=self.mix,
                compute=self.config.compute,
                with_overlap=True,
            ).steps
            self.acceptance.update(pack, results)
            if batch_idx == 0:
                self.examples = pick_examples(pack, results, self.drafter.d2t)

    def on_validation_epoch_end(self) -> None:
        values = {f"val/{name}": value for name, value in self.acceptance.compute().items()}
        self.log_dict(values)
        self.acceptance.reset()

    @property
    def _windows_seen(self) -> int:
        """Windows up to the present one; Lightning writes logs when the log interval divides it."""
        return self.trainer.fit_loop.epoch_loop.total_batch_idx + 1

    @property
    def _compute_dtype(self) -> torch.dtype:
        return self.drafter.fc.weight.dtype

    def _told_if_compiling(self) -> AbstractContextManager[Any]:
        log = self._compile_log
        return nullcontext() if log is None else log.step(self._windows_seen)

    def _sync_gradients_at(self, last: bool) -> AbstractContextManager[Any]:
        strategy = self.trainer.strategy
        if last or not isinstance(strategy, ParallelStrategy):
            return nullcontext()
        return strategy.block_backward_sync()

    def _global_counts(self, packs: list[PackedBatch], bad_samples: int) -> WindowCounts:
        local = row_counts(packs, self.config.ttt_steps)
        extra = torch.tensor([sum(len(pack) for pack in packs), bad_samples])
        total = self._reduce(torch.cat((local, extra)).to(self.device))
        rows, bad = total[-2:].tolist()
        self.bad_samples += bad
        return WindowCounts(total[:-2], rows, self.bad_samples)

    def _reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if dist.is_available() and dist.is_initialized() and self.trainer.world_size > 1:
            dist.all_reduce(tensor)
        return tensor


def _window_sums(results: list[StepResult]) -> Tensor:
    """float64 [S + 1]: summed row losses per step, then rows right at step 0."""
    losses = [result.losses.double().sum() for result in results]
    return torch.stack([*losses, results[0].correct.sum().double()])
