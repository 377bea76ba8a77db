"""Faults met while training: skipped, named, counted, and a stop above the limit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.data.datamodule import ShardDataModule
from eagle3.errors import DataError
from tests.data.windows import chain_starts, reader_threads, windows

Make = Callable[..., dict[str, Any]]
Write = Callable[..., Path]
Build = Callable[..., ShardDataModule]


def test_nan_met_in_training_is_skipped_and_named(
    tmp_path: Path, document: Make, write: Write, build: Build
) -> None:
    documents = [document(9, seed) for seed in range(6)]
    documents[2]["hidden_states"][3][5, 1] = float("nan")
    data = build(write(tmp_path / "s", documents), val_ratio=0.0, accumulate=2)
    for epoch in range(2):
        found = windows(data)
        (line,) = [line for window in found for line in window.bad_samples]
        assert "data_2.pt" in line
        assert "NaN" in line
        assert len(chain_starts(found)) == 5 * 8
        assert data.bad_samples == [line], f"counted once, also in epoch {epoch}"


def test_pack_of_bad_samples_only_is_empty(
    tmp_path: Path, document: Make, write: Write, build: Build
) -> None:
    documents = [document(9, seed) for seed in range(2)]
    documents[0]["hidden_states"][0][3, 0] = float("inf")
    found = windows(build(write(tmp_path / "s", documents), val_ratio=0.0, max_seq_len=9))
    assert sorted(window.packs[0].num_rows for window in found) == [0, 8]
    assert all(w.packs[0].aux_hidden.dtype is torch.bfloat16 for w in found)


def test_too_many_bad_samples_stop_the_run(
    tmp_path: Path, document: Make, write: Write, build: Build
) -> None:
    documents = [document(9, seed) for seed in range(6)]
    for bad in documents[1:4]:
        bad["hidden_states"][1][4, 0] = float("nan")
    data = build(write(tmp_path / "s", documents), val_ratio=0.0)
    data.setup()
    with pytest.raises(DataError, match=r"3 bad samples, data\.max_bad_samples allows 2") as caught:
        list(data.train_dataloader())
    assert all(f"data_{i}.pt" in str(caught.value) for i in (1, 2, 3))
    del caught
    assert not reader_threads()


@pytest.mark.parametrize("damage", ["truncated", "gone", "replaced"])
def test_file_damaged_during_the_run_is_skipped(
    shards: Path, document: Make, truncate: Callable[[Path], None], build: Build, damage: str
) -> None:
    data = build(shards, val_ratio=0.0)
    data.setup()
    victim = shards / "data_4.pt"
    if damage == "truncated":
        truncate(victim)
    elif damage == "gone":
        victim.unlink()
    else:
        torch.save(document(40), victim)
    lines = {line for window in data.train_dataloader() for line in window.bad_samples}
    assert len(lines) >= 1
    assert all("data_4.pt" in line for line in lines)
    assert len(data.bad_samples) == 1


def test_one_truncated_file_of_three(
    tmp_path: Path, document: Make, write: Write, truncate: Callable[[Path], None], build: Build
) -> None:
    shards = write(tmp_path / "s", [document(9, seed) for seed in range(3)])
    truncate(shards / "data_1.pt")
    data = build(shards, val_ratio=0.0, max_bad_samples=1)
    assert len(chain_starts(windows(data))) == 16
    assert len(data.bad_samples) == 1
    with pytest.raises(DataError, match="allows 0"):
        build(shards, max_bad_samples=0).setup()


def test_sample_batch_of_bad_documents_only(
    tmp_path: Path, document: Make, write: Write, build: Build
) -> None:
    bad = document(9)
    bad["hidden_states"][0].fill_(float("nan"))
    data = build(write(tmp_path / "s", [bad]), val_ratio=0.0)
    data.setup()
    with pytest.raises(DataError, match=r"(?s)No training document.*data_0\.pt"):
        data.sample_batch(100)
