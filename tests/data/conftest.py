"""Tiny directories of captured states, written as the public capture script writes them."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.data.datamodule import ShardDataModule
from eagle3.data.declaration import Declaration
from eagle3.data.layout import StateLayout
from eagle3.data.settings import DataSettings
from eagle3.names import LastHidden, LayerIdConvention, LongDocuments, TrainOn

NUM_AUX, HIDDEN, VOCAB = 3, 4, 50
LAYOUT = StateLayout(NUM_AUX, HIDDEN, VOCAB)
DECLARED = Declaration((2, 15, 27), LayerIdConvention.entering, LastHidden.pre_norm)

Document = dict[str, Any]


def make_document(
    tokens: int, seed: int = 0, prompt: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> Document:
    """Random ids and states; the first ``prompt`` tokens (default a third) are not supervised."""
    generator = torch.Generator().manual_seed(seed)
    loss_mask = torch.ones(tokens, dtype=torch.int64)
    loss_mask[: tokens // 3 if prompt is None else prompt] = 0
    return {
        "input_ids": torch.randint(0, VOCAB, (tokens,), generator=generator),
        "loss_mask": loss_mask,
        "hidden_states": [
            torch.randn(tokens, HIDDEN, generator=generator).to(dtype) for _ in range(NUM_AUX + 1)
        ],
    }


def write_documents(
    directory: Path, documents: Iterable[Document], config: dict[str, Any] | None = None
) -> Path:
    """``data_0.pt``, ``data_1.pt``, ... and perhaps ``data_config.json``."""
    directory.mkdir(parents=True, exist_ok=True)
    for i, document in enumerate(documents):
        torch.save(document, directory / f"data_{i}.pt")
    if config is not None:
        (directory / "data_config.json").write_text(json.dumps(config))
    return directory


def cut_file(path: Path) -> None:
    """Keep the first half, as a capture that was killed leaves it."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.fixture
def layout() -> StateLayout:
    return LAYOUT


@pytest.fixture
def document() -> Callable[..., Document]:
    return make_document


@pytest.fixture
def write() -> Callable[..., Path]:
    return write_documents


@pytest.fixture
def truncate() -> Callable[[Path], None]:
    return cut_file


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Twenty documents of 5 to 31 tokens."""
    documents = (make_document(5 + 7 * i % 27, seed=i) for i in range(20))
    return write_documents(tmp_path / "shards", documents)


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., ShardDataModule]:
    """A data module with small defaults; any argument can be replaced."""

    def make(
        *shards: Path, capture: Callable[[], None] | None = None, **changes: Any
    ) -> ShardDataModule:
        settings: dict[str, Any] = {
            "directories": shards,
            "weights": (1.0,) * len(shards),
            "cache": tmp_path / "cache",
            "declaration": DECLARED,
            "layout": LAYOUT,
            "max_seq_len": 16,
            "val_max_seq_len": 32,
            "ttt_steps": 3,
            "draft_steps": 3,
            "long_documents": LongDocuments.split,
            "split_context_tokens": 4,
            "val_ratio": 0.2,
            "train_on": TrainOn.assistant,
            "max_bad_samples": 2,
            "num_workers": 2,
            "prefetch_windows": 2,
            "accumulate": 1,
            "seed": 0,
        }
        return ShardDataModule(DataSettings(**(settings | changes)), capture)

    return make
