"""What SGLang and vLLM compute with an EAGLE-3 drafter, in plain float32.

Stand-alone on purpose, as ``independent_reader``: it shares no code with the drafter whose logits
it is compared with, and nothing but the configuration and the tensors of the file reaches it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ServedDrafter:
    """The one layer, its norms and its head."""

    config: Mapping[str, Any]
    """Flat, as :class:`Loaded` of the reader has it."""
    weights: Mapping[str, Tensor]
    """By parameter, the layer as ``layers.0``."""

    def chain(self, embeds: Tensor, aux_hidden: Tensor, steps: int) -> list[Tensor]:
        """Draft logits [L, D] of each step of a chain, from every row of one sequence at once.

        Row i begins with the token of row i and the aux states before it; at step s it reads the
        token of row i + s (the last one where there is none) and its own output.

        Args:
            embeds: [L, H], embedding of each row's token.
            aux_hidden: [L, K * H]
            steps: draft tokens a round.
        """
        hidden, length = self._fuse(aux_hidden.float()), len(embeds)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        logits = []
        for step in range(steps):
            read = (torch.arange(length) + step).clamp(max=length - 1)
            normed = self._norm("layers.0.hidden_norm", hidden)
            embedded = self._norm("layers.0.input_layernorm", embeds.float()[read])
            residual = normed if self.config.get("norm_before_residual") else hidden
            mixed = torch.cat((embedded, normed), dim=-1)
            query, key, value = self._heads(mixed, torch.arange(length) + step)
            keys.append(key)
            values.append(value)
            hidden = residual + self._attend(query, keys, values) @ self._w("self_attn.o_proj").T
            normed = self._norm("layers.0.post_attention_layernorm", hidden)
            gate, up = (normed @ self._w(f"mlp.{name}_proj").T for name in ("gate", "up"))
            hidden = hidden + (gate * gate.sigmoid() * up) @ self._w("mlp.down_proj").T
            final = self._norm("norm", hidden)
            logits.append(final @ self.weights["lm_head.weight"].float().T)
            hidden = final if self.config.get("norm_output") else hidden
        return logits

    def _fuse(self, aux: Tensor) -> Tensor:
        if self.config.get("norm_before_fc"):
            aux = self._norm("input_norm", aux)
        if self.config.get("fc_norm"):
            parts = aux.split(self.config["hidden_size"], dim=-1)
            aux = torch.cat([self._norm(f"fc_norm.{i}", p) for i, p in enumerate(parts)], dim=-1)
        return aux @ self.weights["fc.weight"].float().T

    def _w(self, name: str) -> Tensor:
        return self.weights[f"layers.0.{name}.weight"].float()

    def _norm(self, name: str, x: Tensor) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.weights[f"{name}.weight"].float()

    def _heads(self, mixed: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value [heads, L, hd]; keys and values repeated to all query heads."""
        size = self.config["head_dim"]
        repeats = self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        frequencies, scale = inverse_frequencies(self.config["rope_parameters"], size)
        angles = positions[:, None] * frequencies
        cos, sin = angles.cos() * scale, angles.sin() * scale

        def heads(name: str) -> Tensor:
            product = mixed @ self._w(f"self_attn.{name}_proj").T
            return product.unflatten(-1, (-1, size)).transpose(0, 1)

        def turned(name: str) -> Tensor:
            x = heads(name)
            if f"layers.0.self_attn.{name}_norm.weight" in self.weights:
                x = self._norm(f"layers.0.self_attn.{name}_norm", x)
            left, right = x[..., : size // 2], x[..., size // 2 :]
            return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)

        key, value = (x.repeat_interleave(repeats, dim=0) for x in (turned("k"), heads("v")))
        return turned("q"), key, value

    def _attend(self, query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Rows 0..i of the first step, and a row's own column of the later ones -> [L, heads*hd]"""
        length = query.shape[1]
        first = query @ keys[0].transpose(1, 2)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        own = [(query * key).sum(-1, keepdim=True) for key in keys[1:]]
        scores = torch.cat([first.masked_fill(later, -math.inf), *own], dim=-1)
        weights = (scores * query.shape[-1] ** -0.5).softmax(dim=-1)
        out = weights[..., :length] @ values[0]
        for step, value in enumerate(values[1:]):
            out = out + weights[..., length + step, None] * value
        return out.transpose(0, 1).flatten(1)


def inverse_frequencies(rope: Mapping[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """Angles per position [head_dim / 2] and the factor on cos and sin, from ``rope_parameters``.

    Raises:
        ValueError: a rope type that is not one of default, linear, llama3 and yarn.
    """
    theta, kind = float(rope["rope_theta"]), rope.get("rope_type", "default")
    exponents = torch.arange(head_dim // 2, dtype=torch.float32) * 2 / head_dim
    plain = theta**-exponents
    if kind == "default":
        return plain, 1.0
    factor = float(rope["factor"])
    if kind == "linear":
        return plain / factor, 1.0
    if kind not in ("llama3", "yarn"):
        raise ValueError(f"rope type {kind!r}: this reader does not know it")
    original = float(rope["original_max_position_embeddings"])
    if kind == "llama3":
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        smooth = (original * plain / (2 * math.pi) - low) / (high - low)
        smooth = smooth.clamp(0, 1)
        return (1 - smooth) * plain / factor + smooth * plain, 1.0

    def turns_at(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    start = max(math.floor(turns_at(float(rope.get("beta_fast", 32)))), 0)
    end = min(math.ceil(turns_at(float(rope.get("beta_slow", 1)))), head_dim - 1)
    ramp = ((torch.arange(head_dim // 2) - start) / max(end - start, 0.001)).clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp), 0.1 * math.log(max(factor, 1)) + 1
