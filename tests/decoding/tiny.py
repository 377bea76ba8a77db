"""A random verifier of few words, so that a random drafter is right now and then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from eagle3.config import ModelConfig
from eagle3.model.drafter import Drafter
from eagle3.model.layers import NormLayout
from eagle3.verifier.huggingface import HuggingFaceVerifier
from tests.helpers import TINY, tiny_drafter

WORDS, DRAFTED = 12, 9
LAYERS = (1, 2, 4)
CONFIG = replace(TINY, vocab_size=WORDS, draft_vocab_size=DRAFTED)


def make_verifier(directory: Path, ends: Sequence[int] = ()) -> HuggingFaceVerifier:
    """Four layers of width 32; logits are spread so that no two are nearly equal."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=WORDS,
            max_position_embeddings=128,
            initializer_range=0.3,
            eos_token_id=list(ends) or None,
            bos_token_id=None,
            pad_token_id=None,
        )
    )
    model.generation_config = GenerationConfig(eos_token_id=list(ends) or None)
    model.save_pretrained(directory)
    return HuggingFaceVerifier(directory)


def make_drafter(
    config: ModelConfig = CONFIG, norms: NormLayout | None = None, seed: int = 0
) -> Drafter:
    """Random, with a draft vocabulary that leaves words out."""
    return tiny_drafter(config, norms=norms, seed=seed).requires_grad_(False)


def make_prompts(lengths: Sequence[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, WORDS, (length,), generator=generator) for length in lengths]
