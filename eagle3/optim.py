"""Optimizer groups, and the learning rate as a pure function of the optimizer step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eagle3.config import OptimConfig
from eagle3.names import Schedule


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


def build_optimizer(module: nn.Module, config: OptimConfig, lr: float) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; weight decay on matrices only."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    matrices = [p for p in trainable if p.ndim >= 2]
    vectors = [p for p in trainable if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
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
    """Size of AdamW's last step over the size of the weights, ``|dw| / |w|`` (scalar).

    Rebuilt from the optimizer's moments, so that no copy of the weights is needed.
    """
    rates = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    moved: list[Tensor] = []
    sizes: list[Tensor] = []
    for parameter in parameters:
        state, group = optimizer.state.get(parameter), rates.get(id(parameter))
        if not state or group is None:
            continue
        beta1, beta2 = group["betas"]
        step = float(state["step"])
        mean = state["exp_avg"] / (1 - beta1**step)
        spread = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt() + group["eps"]
        moved.append(group["lr"] * torch.linalg.vector_norm(mean / spread))
        sizes.append(torch.linalg.vector_norm(parameter))
    if not moved:
        return torch.tensor(math.nan)
    return torch.stack(moved).norm() / torch.stack(sizes).norm()
