"""Tiny trained drafters on disk, under the names of each of their makers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3.model.drafter import Drafter
from eagle3.model.trained_head import CHECKPOINT, SPECFORGE, SPECULATORS
from eagle3.model.weights import VerifierConfig, VerifierWeights
from tests.helpers import TINY

PREFIXES = {SPECFORGE: "midlayer.", SPECULATORS: "layers.0."}
AUX_LAYER_IDS = [2, 30, 58]


def foreign_tensors(drafter: Drafter, kind: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights, map and embedding by the names of ``kind``."""
    tensors = {
        name.replace("layer.", PREFIXES[kind], 1) if name.startswith("layer.") else name: tensor
        for name, tensor in drafter.state_dict().items()
    }
    tensors = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
    return tensors | {"embed_tokens.weight": drafter.embed_tokens}


def foreign_config(drafter: Drafter, kind: str) -> dict[str, Any]:
    """The ``config.json`` that ``kind`` writes."""
    config = drafter.config
    layer: dict[str, Any] = {
        "model_type": str(config.arch),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
    }
    if kind == SPECFORGE:
        said = {k: v for k, v in asdict(drafter.norms).items() if v}
        rope = {"rope_theta": config.rope.theta, "rope_scaling": None}
        nested = {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in AUX_LAYER_IDS]}
        return {**layer, **rope, **said, "eagle_config": nested}
    layer["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope.theta}
    return {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "eagle_aux_hidden_state_layer_ids": AUX_LAYER_IDS,
        **asdict(drafter.norms),
    }


def write_head(
    directory: Path, drafter: Drafter, kind: str, dtype: torch.dtype = torch.float32
) -> Path:
    """The directory of a head; for our own form a checkpoint file in it, without optimizer."""
    directory.mkdir(exist_ok=True)
    if kind == CHECKPOINT:
        path = directory / "best.ckpt"
        weights = {f"drafter.{name}": tensor for name, tensor in drafter.state_dict().items()}
        settings = json.loads(json.dumps(asdict(drafter.config)))
        saved = {"config": {"model": settings}, "aux_layer_ids": AUX_LAYER_IDS}
        torch.save({"state_dict": weights, "eagle3": saved}, path)
        return path
    tensors = foreign_tensors(drafter, kind, dtype)
    save_file({k: v.contiguous() for k, v in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(foreign_config(drafter, kind)))
    return directory


def verifier_of(drafter: Drafter) -> VerifierWeights:
    """A verifier with the drafter's embedding and a random head."""
    generator = torch.Generator().manual_seed(5)
    size, width = drafter.config.vocab_size, drafter.config.hidden_size
    return VerifierWeights(
        embed_tokens=drafter.embed_tokens,
        norm=torch.ones(width),
        head=torch.randn(size, width, generator=generator),
        names={"embed_tokens": "e", "norm": "n", "head": "h"},
        config=VerifierConfig(width, size, 61, TINY.rms_norm_eps, False, False),
    )
