"""A tiny run whose verifier can decode, and whose shards hold what it says."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from eagle3.verifier.base import Sampling
from eagle3.verifier.huggingface import HuggingFaceVerifier
from tests.helpers import TINY, Document
from tests.tiny_run import TinyWorld, make_world, write_shards

LAYERS = (1, 2, 3)


def make_live_world(root: Path, documents: int) -> TinyWorld:
    """Greedy answers of twelve tokens to prompts of three to eight."""
    world = make_world(root, [])
    verifier = _tiny_llama(root / "verifier")
    generator = torch.Generator().manual_seed(1)
    write_shards(root / "shards", [_document(verifier, generator) for _ in range(documents)])
    return world


def _document(verifier: HuggingFaceVerifier, generator: torch.Generator) -> Document:
    length = int(torch.randint(3, 9, (1,), generator=generator))
    prompt = torch.randint(0, TINY.vocab_size, (length,), generator=generator)
    (answer,) = verifier.generate([prompt], Sampling(12))
    ids = torch.cat((prompt, answer))
    (states,) = verifier.capture([ids], LAYERS)
    gates = torch.arange(len(ids)) >= length
    return Document(ids, gates, torch.cat(states.aux, dim=-1), states.last.clone())


def _tiny_llama(directory: Path) -> HuggingFaceVerifier:
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    shutil.rmtree(directory)
    torch.manual_seed(7)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=TINY.hidden_size,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=TINY.vocab_size,
            max_position_embeddings=256,
            initializer_range=0.2,
            rms_norm_eps=TINY.rms_norm_eps,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=None,
        )
    )
    model.generation_config = GenerationConfig()
    model.save_pretrained(directory)
    return HuggingFaceVerifier(directory)
