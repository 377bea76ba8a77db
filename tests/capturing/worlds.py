"""A tiny verifier that chats in single bytes, prompts for it, and what a capture leaves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from eagle3.capturing.config import AnswersConfig, CaptureRunConfig
from eagle3.capturing.plan import plan_capture
from eagle3.capturing.running import CaptureOutcome, capture
from eagle3.data.native import NativeStore
from eagle3.data.native_manifest import read_manifest
from eagle3.data.reading import StateReader
from eagle3.data.sample import Sample
from tests.conversations.templates import CHATML, Kind, chat_template

LAYERS = [1, 2, 3]
HIDDEN = 32
TALK: list[dict[str, Any]] = [
    {"prompt": "Name a colour."},
    {"messages": [{"role": "user", "content": "One?"}], "source": "short"},
    {
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": "Bye"},
            {"role": "assistant", "content": "Farewell, friend."},
        ],
        "source": "long",
    },
    {"conversations": [{"from": "human", "value": "2+2"}, {"from": "gpt", "value": "4"}]},
]


def make_chat_verifier(directory: Path) -> Path:
    """A Llama of four layers whose words are the bytes and markers of the toy tokenizer."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = chat_template(Kind(CHATML)).tokenizer
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=len(tokenizer),
            max_position_embeddings=512,
            initializer_range=0.2,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            pad_token_id=None,
        )
    )
    torch.nn.init.uniform_(model.model.norm.weight, 0.5, 1.5)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(directory)
    return directory


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def token_lines(count: int, seed: int = 0, words: int = 200) -> list[dict[str, Any]]:
    """Random documents of 6 to 60 tokens, the last half of each its answer."""
    generator = torch.Generator().manual_seed(seed)
    lines = []
    for number in range(count):
        length = int(torch.randint(6, 61, (1,), generator=generator))
        ids = torch.randint(0, words, (length,), generator=generator).tolist()
        lines.append({"ids": ids, "n": length // 2, "kind": f"kind {number % 3}"})
    return lines


def settings(verifier: Path, out: Path, **changes: Any) -> CaptureRunConfig:
    """Of a small capture into small shards."""
    answers = AnswersConfig(max_new_tokens=6, batch_tokens=512, **changes.pop("answers", {}))
    known = {
        "verifier": str(verifier),
        "out": str(out),
        "aux_layer_ids": LAYERS,
        "batch_tokens": 128,
        "shard_gb": 1e-4,
        "device": "cpu",
        "answers": answers,
    }
    return CaptureRunConfig(**{**known, **changes})


def run(config: CaptureRunConfig) -> tuple[CaptureOutcome, list[str]]:
    """Capture, and what was said."""
    said: list[str] = []
    return capture(plan_capture(config), said.append), said


def samples(directory: Path) -> list[Sample]:
    """Every document of a native directory."""
    manifest = read_manifest(directory)
    store = NativeStore(directory, manifest.states.layout)
    reader = StateReader(store, store.stored_index(None))
    return [reader.sample(number) for number in range(manifest.num_samples)]


def content(directory: Path) -> dict[str, bytes]:
    """Index and shards; the record beside them holds the time."""
    return {
        path.name: path.read_bytes()
        for path in sorted(directory.iterdir())
        if path.suffix in (".safetensors", ".npz")
    }
