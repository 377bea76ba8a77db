"""The drafter itself: what is trained, and one optimizer step on a real batch."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch

from eagle3.config import Config
from eagle3.data.batch import PackedBatch
from eagle3.data.vocab import VocabMap
from eagle3.model.build import (
    ParameterRow,
    build_drafter,
    build_verifier_head,
    parameter_table,
)
from eagle3.model.drafter import Drafter
from eagle3.model.noise import noisy
from eagle3.model.verifier_head import VerifierHead
from eagle3.model.weights import load_verifier_weights
from eagle3.names import Accelerator, LastHidden
from eagle3.objective import row_counts, run_pack, step_weights
from eagle3.optim import build_optimizer
from eagle3.planning import PackRows, Step, plan, work
from eagle3.preflighting.report import Report
from eagle3.resources import read_host

_FROZEN = ("embed_tokens", "verifier_head", "verifier_norm")
_CPU_FLOPS = 5e12
"""Work of a step above which it is not tried on a CPU: a minute or so."""
_NAMES = {"head": "head", "norm": "final norm", "embed_tokens": "embedding"}


@dataclass(frozen=True)
class Models:
    """Drafter and verifier head of a run."""

    drafter: Drafter
    head: VerifierHead
    names: dict[str, str]
    """The verifier's tensors by what they are used for."""

    @property
    def rows(self) -> list[ParameterRow]:
        return parameter_table(self.drafter, self.head, self.names)


def load_models(config: Config, vocab: VocabMap, last_hidden: LastHidden) -> Models:
    """As training loads them.

    Raises:
        VerifierError: the verifier lacks a tensor.
    """
    assert config.paths.verifier is not None
    mixed = Step.of_config(config, PackRows(())).mixed
    frozen = torch.bfloat16 if mixed else torch.float32
    weights = load_verifier_weights(Path(config.paths.verifier), frozen)
    drafter = build_drafter(config.model, vocab, weights, config.seed)
    head = build_verifier_head(vocab, weights, last_hidden, full=config.val.full_verifier_head)
    return Models(drafter, head, weights.names)


def sizes_only(config: Config) -> Models:
    """Without any value, for a configuration whose verifier is not at hand."""
    with torch.device("meta"):
        drafter = Drafter(config.model)
        head = VerifierHead(
            torch.empty(config.model.hidden_size),
            torch.empty(config.model.draft_vocab_size, config.model.hidden_size),
            eps=config.model.rms_norm_eps,
            last_hidden=LastHidden.pre_norm,
        )
    return Models(drafter, head, _NAMES)


def judge_parts(report: Report, config: Config, rows: Sequence[ParameterRow]) -> None:
    """Whether all that should train does, and nothing else; with a table by part."""
    report.tables.append(_parts_table(rows))
    frozen = _FROZEN if config.model.lm_head_trainable else (*_FROZEN, "lm_head.weight")
    stuck = [row.name for row in rows if not row.trainable and row.name not in frozen]
    loose = [row.name for row in rows if row.trainable and row.name in frozen]
    trained = sum(row.count for row in rows if row.trainable)
    report.facts["trainable_parameters"] = trained
    for names, found, expected in ((stuck, "frozen", "trained"), (loose, "trained", "frozen")):
        if names:
            report.stop(
                "parameters",
                f"found {found}, expected {expected}: {', '.join(names)}",
                "look for what changes requires_grad of the drafter",
            )
    if not stuck and not loose:
        still = ", ".join(frozen)
        report.ok("parameters", f"{trained:,} are trained; frozen: {still}")


def _parts_table(rows: Sequence[ParameterRow]) -> list[str]:
    out = [f"{'part':<14} {'parameters':>14} {'':<9} values from"]
    for part, group in groupby(rows, key=lambda row: row.name.partition(".")[0]):
        members = list(group)
        trained = {row.trainable for row in members}
        kind = "mixed" if len(trained) > 1 else "trained" if trained.pop() else "frozen"
        sources = ", ".join(dict.fromkeys(row.source for row in members))
        out.append(f"{part:<14} {sum(row.count for row in members):>14,} {kind:<9} {sources}")
    return out


def step_place(report: Report, config: Config) -> torch.device | None:
    """Where one step can be tried; None: nowhere here, and the report says so."""
    if config.trainer.accelerator is not Accelerator.cpu and torch.cuda.is_available():
        return torch.device("cuda")
    local = replace(config, trainer=replace(config.trainer, accelerator=Accelerator.cpu))
    rows = config.max_seq_len
    flops = work(Step.of_config(local, PackRows.typical(rows, rows, 1.0))).total
    needed, available = plan(local, world_size=1).total_bytes, read_host().available_bytes
    if flops > _CPU_FLOPS or (available is not None and needed > available):
        report.skip(
            "one step",
            f"{flops / 1e12:,.3g} TFLOP and {needed / 1e9:,.1f} GB are too much for this CPU",
        )
        return None
    return torch.device("cpu")


def judge_step(
    report: Report, config: Config, models: Models, batch: PackedBatch, device: torch.device
) -> float | None:
    """One optimizer step; what it trained is thrown away.

    Returns:
        Rows a second, first-time costs included; None: the step taught nothing.
    """
    drafter, head = models.drafter.to(device), models.head.to(device)
    started = time.perf_counter()
    loss = _backward(config, drafter, head, batch.to(device))
    if loss is None:
        report.warn("one step", "the first documents have no supervised row", "look at the masks")
        return None
    problems = _gradient_problems(drafter, head)
    if not math.isfinite(loss):
        problems.insert(0, f"the loss is {loss}")
    if not problems:
        problems = _update(config, drafter)
    seconds = time.perf_counter() - started
    for problem in problems:
        report.stop("one step", problem, "try compute=reference; look at the states it read")
    if not problems:
        trained = sum(p.requires_grad for p in drafter.parameters())
        report.ok(
            "one step",
            f"{len(batch):,} rows in {seconds:.2f} s on {device.type}: loss {loss:.4g} over "
            f"{config.ttt_steps} TTT steps, gradients reach all {trained} trained tensors and no "
            "frozen one",
        )
    return len(batch) / seconds


def _backward(
    config: Config, drafter: Drafter, head: VerifierHead, batch: PackedBatch
) -> float | None:
    """The loss, its gradients left in the drafter; None: no row is supervised."""
    counts = row_counts([batch], config.ttt_steps)
    if not int(counts[0]):
        return None
    dtype = drafter.fc.weight.dtype
    aux = noisy(batch, config.data.noise, config.noise_std, seed=config.seed, dtype=dtype)
    mixed = Step.of_config(config, PackRows(())).mixed
    device = batch.input_ids.device.type
    with torch.autocast(device, torch.bfloat16) if mixed else nullcontext():
        loss = run_pack(
            drafter,
            head,
            batch,
            aux,
            ttt_steps=config.ttt_steps,
            mix=[(term.name, term.weight) for term in config.loss.mix],
            compute=config.compute,
            weights=step_weights(
                counts.to(device), step_loss_decay=config.loss.step_loss_decay, world_size=1
            ),
        ).loss
    loss.backward()
    return float(loss.detach())


def _gradient_problems(drafter: Drafter, head: VerifierHead) -> list[str]:
    unreached, infinite, loose = [], [], []
    for name, parameter in drafter.named_parameters():
        gradient = parameter.grad
        if not parameter.requires_grad:
            loose += [name] * (gradient is not None)
        elif gradient is None or not gradient.any():
            unreached.append(name)
        elif not gradient.isfinite().all():
            infinite.append(name)
    buffers = [*drafter.named_buffers(), *head.named_buffers()]
    loose += [name for name, tensor in buffers if tensor.grad is not None]
    kinds = (("no gradient reaches", unreached), ("the gradient is not finite in", infinite),
             ("a gradient reaches the frozen", loose))  # fmt: skip
    return [f"{problem} {', '.join(names)}" for problem, names in kinds if names]


def _update(config: Config, drafter: Drafter) -> list[str]:
    """Move the weights as training does, at the peak learning rate."""
    optimizer = build_optimizer(drafter, config.optim, config.lr)
    trained = [p for p in drafter.parameters() if p.requires_grad]
    torch.nn.utils.clip_grad_norm_(trained, config.optim.clip_norm)
    optimizer.step()
    bad = [name for name, p in drafter.named_parameters() if not p.isfinite().all()]
    return [f"the optimizer step leaves values that are not finite in {', '.join(bad)}"] * bool(bad)
