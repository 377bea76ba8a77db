"""Rotary frequencies by name, and reading them from either Hugging Face layout."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from eagle3.config import RopeConfig
from eagle3.errors import ConfigError
from eagle3.names import RopeType


class Rope(nn.Module):
    """cos and sin gathered by position *values*, so packed and split documents come out right."""

    inv_freq: Tensor

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        super().__init__()
        inv_freq, self.scale = frequencies(config, head_dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(
        self, positions: Int[Tensor, " T"]
    ) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T D"]]:
        """cos and sin [T, D] (float32 unless the module is float64) at these positions."""
        angles = positions.to(self.inv_freq.dtype)[:, None] * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.scale, angles.sin() * self.scale


def frequencies(config: RopeConfig, head_dim: int) -> tuple[Float[Tensor, " D2"], float]:
    """Inverse frequencies [head_dim / 2] and the factor on cos and sin.

    linear: all angles divided by ``factor``. llama3: long wavelengths divided, short ones kept, a
    ramp between. yarn (arXiv 2309.00071): the same idea with the ramp in rotations per original
    context, and cos/sin scaled by ``0.1 ln(factor) + 1``.
    """
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    base = 1.0 / config.theta**steps
    if config.type is RopeType.default:
        return base, 1.0
    if config.type is RopeType.linear:
        return base / config.factor, 1.0
    if config.original_max_position_embeddings is None:
        raise ConfigError(
            f"model.rope.type={config.type} needs model.rope.original_max_position_embeddings: "
            "give the context length before extension"
        )
    if config.type is RopeType.llama3:
        return _llama3(base, config, config.original_max_position_embeddings), 1.0
    scale = 0.1 * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0
    return _yarn(base, config, config.original_max_position_embeddings), scale


def _llama3(base: Tensor, config: RopeConfig, original: int) -> Tensor:
    rotations = original * base / (2 * math.pi)
    span = config.high_freq_factor - config.low_freq_factor
    keep = ((rotations - config.low_freq_factor) / span).clamp(0, 1)
    return keep * base + (1 - keep) * base / config.factor


def _yarn(base: Tensor, config: RopeConfig, original: int) -> Tensor:
    half = base.shape[0]

    def index_of(rotations: float) -> float:
        turns = math.log(original / (rotations * 2 * math.pi))
        return half * turns / math.log(config.theta)

    low = max(math.floor(index_of(config.beta_fast)), 0)
    high = min(math.ceil(index_of(config.beta_slow)), 2 * half - 1)
    ramp = (torch.arange(half, device="cpu") - low) / max(high - low, 1e-3)
    keep = 1 - ramp.clamp(0, 1)
    return keep * base + (1 - keep) * base / config.factor


def rope_from_hf(config: dict[str, Any]) -> RopeConfig:
    """Read theta and scaling from a Hugging Face config, old layout or new.

    New: ``rope_parameters`` holds everything. Old: ``rope_theta`` beside ``rope_scaling``.
    Raises :class:`ConfigError` for a rope type we do not know, instead of training a wrong one.
    """
    found = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    kind = str(found.get("rope_type") or found.get("type") or "default")
    if kind not in RopeType.__members__:
        raise ConfigError(
            f"rope type {kind!r} is not known; known: {', '.join(RopeType.__members__)}. "
            "Set model.rope by hand if the drafter may use its own"
        )
    theta = found.get("rope_theta", config.get("rope_theta", RopeConfig.theta))
    names = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
    extra = {name: float(found[name]) for name in names if found.get(name) is not None}
    original = found.get("original_max_position_embeddings")
    return RopeConfig(
        theta=float(theta),
        type=RopeType(kind),
        original_max_position_embeddings=None if original is None else int(original),
        **extra,
    )
