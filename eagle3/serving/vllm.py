"""vLLM's plain form: the class by the layer's type, and the layers at the top.

From ``models/llama_eagle3.py``, ``models/registry.py`` and ``v1/worker/gpu`` of 0.33.0.
"""

from __future__ import annotations

from typing import Any

from eagle3.names import Arch
from eagle3.serving.llama_form import IDS

ARCHITECTURES = {
    Arch.llama: "LlamaForCausalLMEagle3",
    Arch.qwen3: "Eagle3Qwen3ForCausalLM",
}


def fields(entering: tuple[int, ...]) -> dict[str, Any]:
    """The ids that the default runner reads; it counts as we do and ignores nested ones."""
    return {IDS: list(entering)}
