"""Run with the other trainer's Python: one training step of it, or its packs. Prints JSON.

    python -P benchmarks/peer_step.py step CASE.safetensors TTT_STEPS REPEATS
    python -P benchmarks/peer_step.py pack LENGTHS.json MAX_LEN

CASE holds weights and a batch under its own names, and in its metadata the sizes of the model.
LENGTHS is a list of sample lengths in tokens; its sampler packs epoch 0 for one replica.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from measuring import measure
from safetensors import safe_open
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
from transformers import LlamaConfig


def main() -> None:
    command, path, *numbers = sys.argv[1:]
    commands = {"step": step, "pack": pack}
    print(json.dumps(commands[command](Path(path), *map(int, numbers))))


def step(path: Path, ttt_steps: int, repeats: int) -> dict[str, Any]:
    """Loss and cost of a forward and backward over the case."""
    model, batch = read_case(path)
    loss_config = resolve_loss_config("kl_div", "eager")
    losses = []

    def run() -> None:
        _, loss, _ = model(
            **batch, ttt_steps=ttt_steps, ttt_step_loss_decay=1.0, loss_config=loss_config
        )
        loss.backward()
        losses.append(float(loss.detach()))
        # Gradients that the next call found would count as its inputs, not as its peak.
        model.zero_grad(set_to_none=True)

    cost = measure(run, repeats)
    return {"loss": losses[-1], "cpu_s": cost.cpu_s, "peak_bytes": cost.peak_bytes}


def read_case(path: Path) -> tuple[Eagle3DraftModel, dict[str, torch.Tensor]]:
    """The model in its training state, and its batch."""
    weights, batch = {}, {}
    with safe_open(path, framework="pt") as file:
        sizes = json.loads(file.metadata()["sizes"])
        for name in file.keys():  # noqa: SIM118 (the file is not a mapping)
            kind, _, own_name = name.partition(".")
            {"weights": weights, "batch": batch}[kind][own_name] = file.get_tensor(name)
    model = Eagle3DraftModel(model_config(sizes))
    model.load_state_dict(weights, strict=True)
    model.lm_head.weight.requires_grad_(False)
    return model.train(), batch


def model_config(sizes: dict[str, Any]) -> Eagle3SpeculatorConfig:
    """Its defaults, with the attention that trains fastest on a CPU."""
    layer = LlamaConfig(
        **sizes["layer"],
        num_hidden_layers=1,
        attention_bias=False,
        hidden_act="silu",
        tie_word_embeddings=False,
    )
    layer._attn_implementation = "sdpa"
    return Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=sizes["draft_vocab_size"],
        norm_before_residual=True,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )


def pack(path: Path, max_len: int) -> list[list[int]]:
    """Numbers of the samples in each of its batches."""
    lengths = json.loads(path.read_text())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that long samples are cut
        sampler = MultipackDistributedBatchSamplerV2(max_len, lengths, 1, 0)
    sampler.set_epoch(0)
    return [batch.tolist() for batch in sampler]


if __name__ == "__main__":
    main()
