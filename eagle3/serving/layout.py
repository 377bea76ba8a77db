"""Tensor names: one bijective table per target, and the shapes that a drafter must have.

``layer.*`` of ours is ``midlayer.*`` for SGLang and vLLM, and ``layers.0.*`` for speculators. The
oldest SGLang knows only ``midlayer.*`` and drops the other without a word; speculators reads only
``layers.0.*``; vLLM reads both. All other names are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.config import ModelConfig
from eagle3.errors import DataError
from eagle3.model.layers import NormLayout
from eagle3.names import Arch, ExportTarget

EMBEDDING = "embed_tokens.weight"
OFFSETS, SELECTED = "d2t", "t2d"
_LAYER = "layer."
_PREFIXES = {
    ExportTarget.both: "midlayer.",
    ExportTarget.sglang: "midlayer.",
    ExportTarget.vllm: "midlayer.",
    ExportTarget.speculators: "layers.0.",
}


@dataclass(frozen=True)
class NameTable:
    """Our names and those in a file, one to one."""

    to_file: Mapping[str, str]

    @property
    def to_ours(self) -> dict[str, str]:
        """The other direction."""
        return {theirs: ours for ours, theirs in self.to_file.items()}


def name_table(target: ExportTarget, names: Iterable[str]) -> NameTable:
    """How ``target`` calls these tensors of ours."""
    prefix = _PREFIXES[target]
    return NameTable(
        {
            name: prefix + name.removeprefix(_LAYER) if name.startswith(_LAYER) else name
            for name in names
        }
    )


def weight_shapes(config: ModelConfig, norms: NormLayout) -> dict[str, tuple[int, ...]]:
    """Every parameter of a drafter by our name, with its shape."""
    size, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_attention_heads * dim, config.num_key_value_heads * dim
    width = config.num_aux_layers
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (size, width * size),
        "layer.input_layernorm": (size,),
        "layer.hidden_norm": (size,),
        "layer.self_attn.q_proj": (query, 2 * size),
        "layer.self_attn.k_proj": (key, 2 * size),
        "layer.self_attn.v_proj": (key, 2 * size),
        "layer.self_attn.o_proj": (size, query),
        "layer.post_attention_layernorm": (size,),
        "layer.mlp.gate_proj": (inner, size),
        "layer.mlp.up_proj": (inner, size),
        "layer.mlp.down_proj": (size, inner),
        "norm": (size,),
        "lm_head": (config.draft_vocab_size, size),
    }
    if config.arch is Arch.qwen3:
        shapes |= {"layer.self_attn.q_norm": (dim,), "layer.self_attn.k_norm": (dim,)}
    if norms.norm_before_fc:
        shapes["input_norm"] = (width * size,)
    if norms.fc_norm:
        shapes |= {f"fc_norm.{k}": (size,) for k in range(width)}
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def check_weights(
    label: str, tensors: Mapping[str, Tensor], config: ModelConfig, norms: NormLayout
) -> None:
    """Stop unless these are exactly the parameters of such a drafter, finite, and its map.

    Raises:
        DataError: a line per tensor that is unknown, missing, of another shape, or not finite.
    """
    shapes = weight_shapes(config, norms)
    found = []
    for name in sorted(tensors.keys() - shapes.keys() - {OFFSETS, SELECTED}):
        found.append(f"{name}: {_why_unknown(name)}")
    found += [f"{name} is missing" for name in sorted(shapes.keys() - tensors.keys())]
    for name in sorted(shapes.keys() & tensors.keys()):
        tensor = tensors[name]
        if tuple(tensor.shape) != shapes[name]:
            found.append(f"{name} is {list(tensor.shape)}, expected {list(shapes[name])}")
        elif not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            found.append(f"{name} holds NaN, inf or no numbers, expected trained weights")
    found += [f"{name} is missing" for name in (OFFSETS, SELECTED) if name not in tensors]
    if found:
        raise DataError(
            "\n       ".join(
                [f"{label} is not the drafter that its settings describe, not exported:", *found]
            )
        )


def _why_unknown(name: str) -> str:
    if name.endswith(".bias"):
        return "a bias; SGLang builds none, vLLM only with attention_bias: train without"
    if name.startswith("embed_tokens"):
        return (
            "a trained embedding; SGLang replaces it by the verifier's in every release, only "
            "vLLM from 0.33 keeps it: train with the verifier's"
        )
    return "no engine has such a parameter; SGLang would drop it, vLLM would stop"
