"""A tiny verifier, shards and vocabulary map on disk, and real training runs on them."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3.data.vocab import VocabMap
from eagle3.data.vocab_files import save_vocab_map
from tests.helpers import TINY, Document, make_document

OVERRIDES = (
    "name=tiny",
    "trainer.accelerator=cpu",
    "logger.wandb=disabled",
    "data.last_hidden=pre_norm",
    "data.layer_id_convention=entering",
    "data.aux_layer_ids=[1,2,3]",
    "data.split_context_tokens=4",
    "data.num_workers=1",
    "val.max_seq_len=64",
    "trainer.log_every_steps=1",
    "optim.warmup_ratio=0.0",
    "noise_std=0.0",
    "lr=1e-2",
    f"model.hidden_size={TINY.hidden_size}",
    f"model.vocab_size={TINY.vocab_size}",
    f"model.draft_vocab_size={TINY.draft_vocab_size}",
    f"model.intermediate_size={TINY.intermediate_size}",
    f"model.num_attention_heads={TINY.num_attention_heads}",
    f"model.num_key_value_heads={TINY.num_key_value_heads}",
    f"model.head_dim={TINY.head_dim}",
)


@dataclass(frozen=True)
class TinyWorld:
    """Directories of a tiny run, and how to start it."""

    root: Path

    def command(self, *overrides: str) -> list[str]:
        """``python -m eagle3.train`` with every path set; runs land in ``root/runs``."""
        paths = [
            f"paths.verifier={self.root / 'verifier'}",
            f"paths.shards={self.root / 'shards'}",
            f"paths.vocab_map={self.root / 'vocab.safetensors'}",
            f"paths.output={self.root / 'runs'}",
            f"paths.cache={self.root / 'cache'}",
        ]
        return [sys.executable, "-m", "eagle3.train", *OVERRIDES, *paths, *overrides]

    def run(self, *overrides: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Train to the end; fails the test with the output unless ``check`` is off."""
        done = subprocess.run(
            self.command(*overrides),
            capture_output=True,
            text=True,
            check=False,
            cwd=self.root,
            env=clean_environment(),
            timeout=300,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def run_folders(self) -> list[Path]:
        """Run folders, oldest first."""
        return sorted((self.root / "runs").glob("tiny_*"), key=lambda path: path.stat().st_mtime_ns)


def clean_environment() -> dict[str, str]:
    """This environment without ranks, keys or thread counts of the test process."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "WANDB_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    return kept | {"OMP_NUM_THREADS": "1"}


def make_world(root: Path, documents: Sequence[Document]) -> TinyWorld:
    """Write verifier, shards and vocabulary map below ``root``."""
    write_verifier(root / "verifier")
    write_shards(root / "shards", documents)
    selected = torch.arange(0, 2 * TINY.draft_vocab_size, 2)
    save_vocab_map(root / "vocab.safetensors", VocabMap.from_selected(selected, TINY.vocab_size))
    return TinyWorld(root)


def some_documents(count: int, length: int = 14) -> list[Document]:
    """Documents with distinct prompts."""
    return [make_document(length, seed) for seed in range(count)]


def write_verifier(directory: Path) -> None:
    """config.json and the three tensors that training reads."""
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(11)
    shape = (TINY.vocab_size, TINY.hidden_size)
    tensors = {
        "model.embed_tokens.weight": torch.randn(shape, generator=generator),
        "lm_head.weight": torch.randn(shape, generator=generator),
        "model.norm.weight": 1 + 0.2 * torch.randn(shape[1], generator=generator),
    }
    save_file(tensors, directory / "model.safetensors")
    config = {
        "model_type": "llama",
        "hidden_size": TINY.hidden_size,
        "vocab_size": TINY.vocab_size,
        "num_hidden_layers": 4,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(config))


def write_shards(directory: Path, documents: Sequence[Document]) -> None:
    """A speculators v1 directory without data_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    for index, document in enumerate(documents):
        states = list(document.aux_hidden.chunk(TINY.num_aux_layers, dim=-1))
        sample = {
            "input_ids": document.input_ids,
            "loss_mask": document.loss_mask.long(),
            "hidden_states": [state.clone() for state in [*states, document.last_hidden]],
        }
        torch.save(sample, directory / f"data_{index}.pt")


def curve(run_folder: Path, name: str) -> list[float]:
    """The values of one metric over the run."""
    with (run_folder / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def last_weights(run_folder: Path) -> dict[str, Tensor]:
    """The drafter's weights after the last epoch, read as any user may read them."""
    path = max((run_folder / "checkpoints").glob("step*.ckpt"))
    checkpoint = torch.load(path, weights_only=True)
    return dict(checkpoint["state_dict"])
