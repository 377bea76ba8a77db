"""Fields of ``config.json`` that every target shares: sizes and rotary embedding of the layer."""

from __future__ import annotations

from typing import Any

from eagle3.config import ModelConfig, RopeConfig
from eagle3.names import ExportDtype, RopeType

IDS = "eagle_aux_hidden_state_layer_ids"
_BY_TYPE: dict[RopeType, tuple[str, ...]] = {
    RopeType.default: (),
    RopeType.linear: ("factor",),
    RopeType.llama3: (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    RopeType.yarn: ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings"),
}


def rope_fields(rope: RopeConfig) -> dict[str, Any]:
    """Theta and scaling in both layouts of Hugging Face, since readers look in either.

    New: ``rope_parameters`` holds everything. Old: ``rope_theta`` beside ``rope_scaling``, which is
    null for the plain embedding.
    """
    scaling = {key: getattr(rope, key) for key in _BY_TYPE[rope.type]}
    typed = {"rope_type": str(rope.type), **scaling}
    return {
        "rope_parameters": {**typed, "rope_theta": rope.theta},
        "rope_theta": rope.theta,
        "rope_scaling": typed if scaling else None,
    }


def layer_fields(model: ModelConfig, dtype: ExportDtype) -> dict[str, Any]:
    """A Llama (or Qwen3) configuration of one layer; ``head_dim`` and vocabulary are said."""
    return {
        "model_type": str(model.arch),
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": model.rms_norm_eps,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype),
        "dtype": str(dtype),
        **rope_fields(model.rope),
    }
