"""SGLang: what it cannot serve, and the fields that it reads.

From ``models/llama_eagle3.py`` and ``speculative/eagle_worker_v2.py`` of 0.5.9 to 0.5.23.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eagle3.config import ModelConfig
from eagle3.model.layers import NormLayout
from eagle3.names import Arch
from eagle3.serving.llama_form import IDS
from eagle3.serving.versions import Change, Version, show

ARCHITECTURE = "LlamaForCausalLMEagle3"
FLAGS = {
    "fc_norm": Change((0, 5, 9), (0, 5, 12)),
    "norm_output": Change((0, 5, 9), (0, 5, 12)),
    "norm_before_fc": Change((0, 5, 14), (0, 5, 18)),
}
"""Releases that read a norm flag; others ignore it and serve other mathematics."""


def refusals(model: ModelConfig, norms: NormLayout, oldest: Version) -> Iterator[str]:
    """Why SGLang, from ``oldest`` on, would serve something else than was trained."""
    if norms.norm_before_residual:
        yield (
            "norm_before_residual: no SGLang reads it, it adds the raw state instead; vLLM from "
            "0.33.0 serves it: target=vllm or target=speculators"
        )
    for flag, change in FLAGS.items():
        if getattr(norms, flag) and oldest < change.present:
            yield (
                f"{flag}: SGLang reads it {change}, min_sglang is {show(oldest)}: give "
                f"min_sglang={show(change.present)} and serve with that, or target=vllm"
            )
    if model.arch is Arch.qwen3:
        yield (
            "model.arch=qwen3: SGLang's drafter has no q_norm and k_norm and drops them; vLLM "
            "from 0.33.0 serves it: target=vllm or target=speculators"
        )


def fields(ids: tuple[int, ...]) -> dict[str, Any]:
    """Where SGLang looks for the layers; see :mod:`eagle3.serving.layer_ids`."""
    return {"eagle_config": {IDS: list(ids), "use_aux_hidden_state": True}}
