"""Several directories under one numbering."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.data.datamodule import ShardDataModule
from eagle3.data.declaration import Declaration
from eagle3.errors import DataError
from eagle3.names import LastHidden, LayerIdConvention
from tests.data.windows import windows

Build = Callable[..., ShardDataModule]
Make = Callable[..., dict[str, Any]]
Write = Callable[..., Path]

ENTERING = {
    "hidden_states": {
        "layer_ids": [2, 15, 27],
        "layer_id_convention": "entering",
        "last_hidden": "pre_norm",
    }
}
AFTER = {
    "hidden_states": {
        "layer_ids": [1, 14, 26],
        "layer_id_convention": "after",
        "last_hidden": "pre_norm",
    }
}


@pytest.fixture
def chat(tmp_path: Path, document: Make, write: Write) -> Path:
    return write(tmp_path / "chat", [document(9, seed) for seed in range(8)], ENTERING)


@pytest.fixture
def code(tmp_path: Path, document: Make, write: Write) -> Path:
    return write(tmp_path / "code", [document(12, seed) for seed in range(100, 106)], AFTER)


def seen(data: ShardDataModule, epoch: int) -> Counter[int]:
    """How often an epoch trains each document."""
    return Counter(s.document for pack in data.epoch_plan(epoch).packs for s in pack)


def test_directories_that_count_layers_differently_are_one_corpus(
    chat: Path, code: Path, build: Build
) -> None:
    data = build(chat, code, declaration=Declaration(), val_ratio=0.0)
    data.setup()
    assert data.description.num_documents == 14
    assert data.description.aux_layer_ids == (2, 15, 27)
    assert data.sources == ("chat", "code")
    assert seen(data, 0) == Counter(range(14))
    packs = [pack for window in windows(data) for pack in window.packs]
    labels = Counter(label for pack in packs for label in pack.document_sources)
    assert labels == {"chat": 8, "code": 6}


def test_states_come_from_the_right_directory(
    chat: Path, code: Path, build: Build, document: Make
) -> None:
    data = build(chat, code, declaration=Declaration(), val_ratio=0.0)
    for window in windows(data):
        for pack in window.packs:
            for place, (label, length) in enumerate(
                zip(pack.document_sources, pack.document_lengths, strict=True)
            ):
                ids = pack.input_ids[pack.document_ids == place]
                seeds = range(8) if label == "chat" else range(100, 106)
                candidates = [document(length, seed) for seed in seeds]
                (source,) = [d for d in candidates if torch.equal(d["input_ids"][1:], ids)]
                expected = torch.cat(source["hidden_states"][:-1], dim=1)[:-1]
                assert torch.equal(pack.aux_hidden[pack.document_ids == place], expected)


def test_weights_say_how_often_an_epoch_takes_a_document(
    chat: Path, code: Path, build: Build
) -> None:
    data = build(chat, code, declaration=Declaration(), val_ratio=0.0, weights=(0.5, 2.0))
    data.setup()
    first, second = seen(data, 0), seen(data, 1)
    for epoch in (first, second):
        assert sum(count for d, count in epoch.items() if d < 8) == 4
        assert all(epoch[d] == 2 for d in range(8, 14))
    assert {d for d in first + second if d < 8} == set(range(8)), "by turns"
    assert data.steps_in_epoch(0) == data.epoch_plan(0).steps


def test_siblings_stay_together_across_directories(
    tmp_path: Path, document: Make, write: Write, build: Build
) -> None:
    copies = [document(9, seed) for seed in range(10)]
    one = write(tmp_path / "one", copies)
    two = write(tmp_path / "two", copies)
    data = build(one, two, val_ratio=0.3)
    data.setup()
    trained = set(seen(data, 0))
    held_out = set(range(20)) - trained
    assert held_out
    assert {d + 10 if d < 10 else d - 10 for d in held_out} == held_out


def test_one_corpus_has_one_kind_of_states(
    chat: Path, tmp_path: Path, document: Make, write: Write, build: Build
) -> None:
    wrong = write(tmp_path / "wrong", [document(9, 50)])
    declared = Declaration((2, 15, 27), LayerIdConvention.entering, LastHidden.pre_norm)
    single = write(tmp_path / "single", [document(9, 51, dtype=torch.float32)])
    with pytest.raises(DataError, match=r"single: .* torch.float32.*bfloat16.*keeps dtypes"):
        build(chat, single, declaration=declared).setup()
    with pytest.raises(DataError, match=r"wrong: neither data_config.json nor the config"):
        build(chat, wrong, declaration=Declaration()).setup()


def test_order_and_copies_do_not_change_the_fingerprint(
    chat: Path, code: Path, build: Build
) -> None:
    a = build(chat, code, declaration=Declaration())
    b = build(code, chat, declaration=Declaration())
    a.setup()
    b.setup()
    assert a.description.fingerprint == b.description.fingerprint
