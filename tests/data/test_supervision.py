"""Which tokens gate a loss, from the files to the windows, and what is said about it."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.data.datamodule import ShardDataModule
from eagle3.errors import DataError
from eagle3.names import TrainOn
from tests.data.windows import windows

Make = Callable[..., dict[str, Any]]
Write = Callable[..., Path]
Build = Callable[..., ShardDataModule]


@pytest.mark.parametrize("train_on", TrainOn)
def test_token_frequencies_count_supervised_training_tokens(
    tmp_path: Path, document: Make, write: Write, build: Build, train_on: TrainOn
) -> None:
    documents = [document(10, seed, prompt=3) for seed in range(4)]
    documents[0]["loss_mask"][6] = 0
    data = build(write(tmp_path / "s", documents), val_ratio=0.0, train_on=train_on)
    data.setup()
    kept = {TrainOn.assistant: 27, TrainOn.last_turn: 24, TrainOn.all: 40}[train_on]
    counts = data.token_frequencies()
    assert counts.dtype is torch.int64
    assert counts.shape == (50,)
    assert int(counts.sum()) == kept
    if train_on is TrainOn.assistant:
        ids = torch.cat([d["input_ids"][d["loss_mask"].bool()] for d in documents])
        assert torch.equal(counts, torch.bincount(ids, minlength=50))


@pytest.mark.parametrize(
    ("train_on", "expected"),
    [
        pytest.param(TrainOn.assistant, [0, 0, 1, 0, 1, 1], id="assistant"),
        pytest.param(TrainOn.last_turn, [0, 0, 0, 0, 1, 1], id="last_turn"),
        pytest.param(TrainOn.all, [1, 1, 1, 1, 1, 1], id="all"),
    ],
)
def test_windows_are_gated_by_the_trained_turns(
    tmp_path: Path,
    document: Make,
    write: Write,
    build: Build,
    train_on: TrainOn,
    expected: list[int],
) -> None:
    """Mask 0 0 0 1 0 1 1, of which a row takes the gate of its next token."""
    two_turns = document(7, prompt=3)
    two_turns["loss_mask"][4] = 0
    shards = write(tmp_path / "s", [two_turns])
    ((pack,),) = (w.packs for w in windows(build(shards, val_ratio=0.0, train_on=train_on)))
    assert pack.loss_mask[:6].int().tolist() == expected
    assert not pack.loss_mask[6:].any()


def test_unsupervised_documents_are_counted(
    tmp_path: Path, document: Make, write: Write, build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    """Masks of zeros, of ones, and mixed."""
    documents = [document(10, 0, prompt=10), document(10, 1, prompt=0), document(10, 2, prompt=5)]
    data = build(write(tmp_path / "s", documents), val_ratio=0.0)
    with caplog.at_level(logging.INFO, "eagle3"):
        data.setup()
    assert data.report.unsupervised_documents == 1
    assert data.report.documents == 2
    assert "50.0 % supervised" in caplog.text
    assert "1 documents have no supervised row" in caplog.text


def test_nothing_supervised_stops(
    tmp_path: Path, document: Make, write: Write, build: Build
) -> None:
    shards = write(tmp_path / "s", [document(10, seed, prompt=10) for seed in range(3)])
    with pytest.raises(DataError, match="no supervised row in any of 3 documents"):
        build(shards).setup()
    build(shards, train_on=TrainOn.all).setup()


def test_unmasked_prompts_are_warned_about(
    tmp_path: Path, document: Make, write: Write, build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    build(write(tmp_path / "s", [document(10, 0, prompt=0), document(10, 1, prompt=0)])).setup()
    assert "is the prompt masked?" in caplog.text
