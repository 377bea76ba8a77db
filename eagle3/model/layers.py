"""Elementary layers of the drafter: RMSNorm, rotary embedding, attention projections, MLP.

The decoder layer is split where attention sits, since training and serving attend differently:
:mod:`eagle3.model.projection` makes queries, keys and values; ``finish`` takes what attention
returned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from eagle3.config import ModelConfig
from eagle3.dims import Computed, Hidden
from eagle3.model.scope import Scope
from eagle3.names import Arch, NormPreset, Recompute

Projected = Float[Tensor, "T heads_D"]


@dataclass(frozen=True)
class NormLayout:
    """Where norms sit beyond the plain EAGLE-3 layer. All false is what every engine serves."""

    norm_before_residual: bool = False
    """The residual is the normalised hidden state instead of the raw one."""
    norm_before_fc: bool = False
    """One RMSNorm over the concatenated aux states before ``fc``."""
    fc_norm: bool = False
    """One RMSNorm per aux state before ``fc``."""
    norm_output: bool = False
    """The next step reads the state after the final norm instead of before it."""

    def __post_init__(self) -> None:
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other: choose one")

    @classmethod
    def preset(cls, name: NormPreset) -> NormLayout:
        """The layout behind a name in the configuration."""
        return {
            NormPreset.portable: cls(),
            NormPreset.eagle3_1: cls(fc_norm=True, norm_output=True),
            NormPreset.speculators: cls(
                norm_before_residual=True, norm_before_fc=True, norm_output=True
            ),
        }[name]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis, computed in float32 (float64 stays); same dtype out as in."""
    wide = x if x.dtype == torch.float64 else x.float()
    return F.rms_norm(wide, weight.shape, weight.to(wide.dtype), eps).to(x.dtype)


class RMSNorm(nn.Module):
    """:func:`rms_norm` with a trainable gain that starts at one."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rotate(
    x: Float[Tensor, "T heads D"], cos: Float[Tensor, "T D"], sin: Float[Tensor, "T D"]
) -> Float[Tensor, "T heads D"]:
    """Apply rotary embedding in the half-split (neox) form that both serving engines use."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * cos[:, None].to(x.dtype) + turned * sin[:, None].to(x.dtype)


class MLP(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Hidden) -> Hidden:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Projections of grouped-query attention over ``cat(embedding, hidden)``; no biases."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, dim = 2 * config.hidden_size, config.head_dim
        self.head_dim = dim
        self.q_proj = nn.Linear(width, config.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, config.hidden_size, bias=False)
        per_head_norm = config.arch is Arch.qwen3
        self.q_norm = RMSNorm(dim, config.rms_norm_eps) if per_head_norm else nn.Identity()
        self.k_norm = RMSNorm(dim, config.rms_norm_eps) if per_head_norm else nn.Identity()

    def queries(self, projected: Projected, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, Hq * D] -> [T, Hq, D], normalised if the architecture says so, and rotated."""
        return rotate(self.q_norm(projected.unflatten(-1, (-1, self.head_dim))), cos, sin)

    def keys(self, projected: Projected, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, Hkv * D] -> [T, Hkv, D], normalised if the architecture says so, and rotated."""
        return rotate(self.k_norm(projected.unflatten(-1, (-1, self.head_dim))), cos, sin)

    def values(self, projected: Projected) -> Tensor:
        """[T, Hkv * D] -> [T, Hkv, D]."""
        return projected.unflatten(-1, (-1, self.head_dim))


class DecoderLayer(Scope):
    """The drafter's only layer.

    ``input_layernorm`` belongs to the token embedding, ``hidden_norm`` to the hidden state; both
    halves are concatenated, embedding first (SGLang and vLLM ``models/llama_eagle3.py``).
    """

    def __init__(self, config: ModelConfig, norms: NormLayout) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norms = norms
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, config.intermediate_size)

    def finish(
        self,
        attended: Float[Tensor, "A Hq D"],
        residual: Computed,
        recompute: Recompute = Recompute.none,
    ) -> Computed:
        """Output projection, residual, MLP, residual: the layer's output before the final norm."""
        hidden = residual + self.self_attn.o_proj(attended.flatten(1))
        if recompute == Recompute.mlp and torch.is_grad_enabled():
            block = checkpoint(
                self._mlp_block, hidden, use_reentrant=False, preserve_rng_state=False
            )
            return hidden + block
        return hidden + self._mlp_block(hidden)

    def _mlp_block(self, hidden: Hidden) -> Hidden:
        return self.mlp(self.post_attention_layernorm(hidden))
