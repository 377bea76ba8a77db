"""SGLang's own draft class loads an export and drafts: ``python sglang_draft.py DIR IN OUT``.

IN holds ``embeds`` [n, H], ``aux_hidden`` [n, K*H] and ``steps``; OUT gets the logits of each step
from the last row on, the loaded parameters' names and the verifier id of each draft id.
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

stand_in.install("IPython loguru torchvision tvm_ffi")

from sglang.srt.distributed import parallel_state  # noqa: E402
from sglang.srt.models import llama as base  # noqa: E402
from sglang.srt.models import llama_eagle3  # noqa: E402
from sglang.srt.runtime_context import get_context, get_parallel  # noqa: E402

RANKS = ["tp", "pp", "attn_tp", "attn_dp", "attn_cp", "attn_dcp", "moe_ep", "moe_tp", "moe_dp"]


class Attention(stand_in.PlainAttention):
    """In place of RadixAttention."""

    def __init__(
        self, num_heads: int, head_dim: int, scaling: float, num_kv_heads: int, **_: Any
    ) -> None:
        super().__init__(num_heads, head_dim, scaling, num_kv_heads)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.attend(query, key, value)


def load(directory: Path) -> Any:
    """The class with the export's configuration and weights."""
    base.RadixAttention = Attention
    address = f"file://{directory}/.rendezvous"
    parallel_state.init_distributed_environment(1, 0, address, 0, "gloo")
    parallel_state.initialize_model_parallel(backend="gloo")
    get_parallel().override_permanently(**{f"{name}_rank": 0 for name in RANKS})
    config = LlamaConfig(**json.loads((directory / "config.json").read_text()))
    model = llama_eagle3.LlamaForCausalLMEagle3(config)
    model.load_weights(load_file(directory / "model.safetensors").items())
    stand_in.use_native_kernels(model)
    return model


@torch.inference_mode()
def draft(model: Any, embeds: Tensor, aux_hidden: Tensor, steps: int) -> list[Tensor]:
    """All rows at once, then one token at a time from the last one, as the engine drafts."""
    logits, hidden = [], aux_hidden
    rows = len(aux_hidden)
    for step in range(steps):
        read = embeds[:rows] if step == 0 else embeds[rows + step - 1 :][:1]
        positions = torch.arange(rows) if step == 0 else torch.tensor([rows + step - 1])
        batch = stand_in.Loose(spec_info=stand_in.Loose(hidden_states=hidden))
        output, (fed_back,) = model.model(None, positions, batch, input_embeds=read)
        logits.append(output[-1] @ model.lm_head.weight[: model.config.draft_vocab_size].T)
        hidden = fed_back[-1:]
    return logits


def main() -> None:
    directory, given, out = map(Path, sys.argv[1:])
    torch.set_default_dtype(torch.float32)
    with get_context().override_server_args(device="cpu", dtype="float32"):
        model = load(directory)
        found = torch.load(given, weights_only=True)
        logits = draft(model, found["embeds"], found["aux_hidden"], found["steps"])
        parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        ids = model.hot_token_id
    torch.save({"logits": logits, "parameters": parameters, "ids": ids}, out)


if __name__ == "__main__":
    main()
