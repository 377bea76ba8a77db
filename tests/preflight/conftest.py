"""A sound capture, its verifier and its vocabulary map, and the configuration that trains on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from eagle3.compose import to_config
from eagle3.config import Config
from eagle3.data.vocab import VocabMap
from eagle3.data.vocab_files import save_vocab_map
from tests.inspection.planted import CONFIG, EPS, HIDDEN, VOCAB, capture, make_verifier, save

DRAFT_VOCAB = VOCAB - 2
Configure = Callable[..., Config]


def vocab_map(path: Path, verifier_size: int = VOCAB, origin: Any = None) -> Path:
    """The first tokens of the vocabulary."""
    selected = torch.arange(DRAFT_VOCAB)
    save_vocab_map(path, VocabMap.from_selected(selected, verifier_size), origin)
    return path


@pytest.fixture(scope="session")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_verifier(tmp_path_factory.mktemp("preflight") / "verifier")
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    tensors["model.embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator)
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture
def configure(tmp_path: Path, verifier: Path) -> Configure:
    """The configuration of a run on ``tmp_path / "shards"``, which are sound unless they exist."""

    def make(**tree: Any) -> Config:
        shards = tmp_path / "shards"
        if not shards.exists():
            save(shards, capture(), CONFIG)
        base = {
            "max_seq_len": 70,
            "epochs": 1,
            "paths": {
                "verifier": str(verifier),
                "shards": str(shards),
                "vocab_map": str(vocab_map(tmp_path / "vocab.safetensors")),
                "output": str(tmp_path / "runs"),
                "cache": str(tmp_path / "cache"),
            },
            "data": {"split_context_tokens": 4, "num_workers": 1, "val_ratio": 0.1},
            "model": {
                "hidden_size": HIDDEN,
                "vocab_size": VOCAB,
                "draft_vocab_size": DRAFT_VOCAB,
                "intermediate_size": 24,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 8,
                "rms_norm_eps": EPS,
            },
            "trainer": {"accelerator": "cpu"},
        }
        return to_config(OmegaConf.merge(base, tree))

    return make
