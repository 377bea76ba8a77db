"""Optimizer groups, and the learning rate as a pure function of the optimizer step."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from eagle3.config import OptimConfig
from eagle3.muon import MuonWithAdamW
from eagle3.names import OptimizerName, Schedule

_MUON_PARTS = ("fc.", "layer.")


@dataclass(frozen=True)
class LrSchedule:
    """Peak rate, shape and length; no state, so a resumed run cannot be off by a step."""

    peak: float
    total_steps: int
    warmup_steps: int
    kind: Schedule
    min_ratio: float = 0.0

    @classmethod
    def from_config(cls, config: OptimConfig, peak: float, total_steps: int) -> LrSchedule:
        """Warmup is ``warmup_ratio`` of all steps, rounded up: 1 % of 25,450 is 255."""
        warmup = math.ceil(config.warmup_ratio * total_steps - 1e-9)
        return cls(peak, total_steps, warmup, config.schedule, config.min_lr_ratio)

    def __call__(self, step: int) -> float:
        """Rate used by optimizer step ``step`` (from 0).

        Warmup rises linearly to the peak and its first step is not wasted: ``(step + 1) / warmup``.
        Then cosine or linear decay to ``min_ratio * peak`` at ``total_steps``, or constant.
        """
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.kind is Schedule.constant:
            return self.peak
        span = max(self.total_steps - self.warmup_steps, 1)
        done = min((step - self.warmup_steps) / span, 1.0)
        left = 1.0 - done if self.kind is Schedule.linear else 0.5 * (1 + math.cos(math.pi * done))
        return self.peak * (self.min_ratio + (1 - self.min_ratio) * left)


def build_optimizer(module: nn.Module, config: OptimConfig, lr: float) -> torch.optim.Optimizer:
    """The configured optimizer over the trainable parameters; weight decay on matrices only.

    Muon takes the matrices below ``fc`` and ``layer``. Its updates are scaled to the size of
    AdamW's (Moonshot, arXiv:2502.16982, section 2.2), so both are used at the same ``lr``.
    """
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if config.optimizer is OptimizerName.adamw:
        return _adamw(trainable.values(), config, lr)
    matrices = {
        name: p for name, p in trainable.items() if p.ndim == 2 and name.startswith(_MUON_PARTS)
    }
    others = [p for name, p in trainable.items() if name not in matrices]
    return MuonWithAdamW(
        list(matrices.values()),
        _adamw(others, config, lr),
        lr=lr,
        weight_decay=config.weight_decay,
        momentum=config.muon_momentum,
        ns_steps=config.muon_ns_steps,
        adjust_lr_fn="match_rms_adamw",
    )


class PullToStart:
    """An L2 penalty on the distance of all trainable weights from their present values.

    ``strength / 2 * |w - w0|**2`` is added to the loss (L2-SP: Li, Grandvalet, Davoine 2018,
    arXiv:1802.01483, eq. 2), so ``strength * (w - w0)`` to the gradient. It joins after clipping,
    so that ``optim/grad_norm`` and the clip limit stay those of the data. It is not decoupled as
    weight decay is: times the learning rates in use here it would move nothing.

    Args:
        module: with the weights of the start in it; one copy of them is kept, in their dtype.
    """

    def __init__(self, module: nn.Module, strength: float) -> None:
        self._strength = strength
        self._parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._start = {n: p.detach().clone() for n, p in self._parameters.items()}
        self._digest: str | None = None

    @torch.no_grad()
    def add_to_gradients(self) -> None:
        """Add the gradient of the penalty to every gradient there is."""
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                continue
            # the module has moved to its device since
            start = self._start[name] = self._start[name].to(parameter.device)
            parameter.grad.add_(parameter - start, alpha=self._strength)

    @property
    def digest(self) -> str:
        """Hash of names and values of the start: 16 hexadecimal digits."""
        if self._digest is None:
            hashed = hashlib.sha256()
            for name, start in sorted(self._start.items()):
                hashed.update(name.encode())
                hashed.update(start.cpu().contiguous().view(torch.uint8).numpy().data)
            self._digest = hashed.hexdigest()[:16]
        return self._digest


def _adamw(parameters: Iterable[Tensor], config: OptimConfig, lr: float) -> torch.optim.AdamW:
    given = list(parameters)
    groups = [
        {"params": [p for p in given if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in given if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


@torch.no_grad()
def update_ratio(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> Tensor:
    """Size of the last step, weight decay apart, over that of the weights: ``|dw| / |w|`` (scalar).

    AdamW's is rebuilt from its moments, so that no copy of the weights is needed; Muon's is what
    :class:`eagle3.muon.MuonWithAdamW` measured.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    moved: list[Tensor] = []
    sizes: list[Tensor] = []
    for parameter in parameters:
        state, group = optimizer.state.get(parameter), groups.get(id(parameter))
        if not state or group is None:
            continue
        measured = "update_norm" in state
        moved.append(state["update_norm"] if measured else _adamw_update_norm(state, group))
        sizes.append(torch.linalg.vector_norm(parameter))
    if not moved:
        return torch.tensor(math.nan)
    return torch.stack(moved).norm() / torch.stack(sizes).norm()


def _adamw_update_norm(state: Mapping[str, Tensor], group: Mapping[str, Any]) -> Tensor:
    """Size of AdamW's last step on one parameter."""
    beta1, beta2 = group["betas"]
    step = float(state["step"])
    mean = state["exp_avg"] / (1 - beta1**step)
    spread = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt() + group["eps"]
    return group["lr"] * torch.linalg.vector_norm(mean / spread)
