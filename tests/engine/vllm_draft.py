"""vLLM's own draft class loads an export and drafts: ``python vllm_draft.py DIR IN OUT``.

IN and OUT as in sglang_draft.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import stand_in
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

stand_in.install(
    "IPython anthropic cbor2 cv2 depyf ijson lark llguidance lmformatenforcer loguru "
    "mistral_common model_hosting_container_standards ninja opentelemetry outlines_core "
    "prometheus_fastapi_instrumentator pycountry torchvision tvm_ffi uvloop xgrammar"
)

from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import (  # noqa: E402
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.model_executor.models import llama, llama_eagle3, qwen3, qwen3_eagle3  # noqa: E402

TARGET_LAYERS = 30
CLASSES = {  # as in vLLM's registry
    "LlamaForCausalLMEagle3": llama_eagle3.Eagle3LlamaForCausalLM,
    "Eagle3Qwen3ForCausalLM": qwen3_eagle3.Eagle3Qwen3ForCausalLM,
}


class Attention(stand_in.PlainAttention):
    """In place of vLLM's."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, **_: Any
    ) -> None:
        super().__init__(num_heads, head_size, scale, num_kv_heads)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.attend(query, key, value)


def load(directory: Path, settings: VllmConfig) -> Any:
    """The class with the export's configuration and weights."""
    llama.Attention = qwen3.Attention = Attention
    config = LlamaConfig(**json.loads((directory / "config.json").read_text()))
    init_distributed_environment(1, 0, f"file://{directory}/.rendezvous", 0, "gloo")
    ensure_model_parallel_initialized(1, 1)
    target = stand_in.Loose(
        hf_config=config,
        dtype=torch.float32,
        get_total_num_hidden_layers=lambda: TARGET_LAYERS,
        get_vocab_size=lambda: config.vocab_size,
    )
    drafter = stand_in.Loose(draft_model_config=stand_in.Loose(hf_config=config))
    object.__setattr__(settings, "model_config", target)
    object.__setattr__(settings, "speculative_config", drafter)
    model = CLASSES[config.architectures[0]](vllm_config=settings)
    model.load_weights(load_file(directory / "model.safetensors").items())
    stand_in.use_native_kernels(model)
    return model


@torch.inference_mode()
def draft(model: Any, embeds: Tensor, aux_hidden: Tensor, steps: int) -> list[Tensor]:
    """All rows at once, then one token at a time from the last one, as the engine drafts."""
    logits, hidden = [], model.combine_hidden_states(aux_hidden)
    rows = len(aux_hidden)
    for step in range(steps):
        read = embeds[:rows] if step == 0 else embeds[rows + step - 1 :][:1]
        positions = torch.arange(rows) if step == 0 else torch.tensor([rows + step - 1])
        output, fed_back = model.model.forward(None, positions, hidden, input_embeds=read)
        logits.append(output[-1] @ model.lm_head.weight[: model.config.draft_vocab_size].T)
        hidden = fed_back[-1:]
    return logits


def main() -> None:
    directory, given, out = map(Path, sys.argv[1:])
    torch.set_default_dtype(torch.float32)
    settings = VllmConfig(device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(settings):
        model = load(directory, settings)
        found = torch.load(given, weights_only=True)
        logits = draft(model, found["embeds"], found["aux_hidden"], found["steps"])
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    offsets = model.draft_id_to_target_id
    ids = None if offsets is None else offsets + torch.arange(len(offsets))
    torch.save({"logits": logits, "parameters": parameters, "ids": ids}, out)


if __name__ == "__main__":
    main()
