"""A random four-layer Llama on disk, and token sequences for it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

from eagle3.tokens import TokenSequence

NUM_LAYERS, VOCAB = 4, 100


def make_tiny_verifier(directory: Path, seed: int = 0) -> Path:
    """Save a Llama of hidden size 32 with a norm gain away from one; returns ``directory``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=256,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    torch.nn.init.uniform_(model.model.norm.weight, 0.5, 1.5)
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text(json.dumps({"model": "none"}))
    return directory


def load_reference(directory: Path) -> Any:
    """The model as transformers loads it, with its head."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def make_sequences(count: int, seed: int = 0, longest: int = 40) -> list[TokenSequence]:
    """Random documents of 4 tokens and more, a quarter of each its prompt."""
    draw = random.Random(seed)
    sequences = []
    for _ in range(count):
        length = draw.randint(4, longest)
        ids = tuple(draw.randrange(VOCAB) for _ in range(length))
        sequences.append(TokenSequence(ids, length // 4))
    return sequences
