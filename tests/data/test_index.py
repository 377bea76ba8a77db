"""What is known of a directory without its states, and who validates."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from eagle3.data.bad_samples import BadSamples
from eagle3.data.formats import open_store
from eagle3.data.index import DocumentIndex, build_index, validation_documents
from eagle3.data.layout import LayoutError, StateLayout
from eagle3.errors import DataError

Make = Callable[..., dict[str, Any]]
Write = Callable[..., Path]
HASHES = hnp.arrays(np.uint64, st.integers(0, 40), elements=st.integers(0, 2**64 - 1))


@pytest.fixture
def index_of(tmp_path: Path, layout: StateLayout) -> Callable[..., DocumentIndex]:
    def build(directory: Path, bad: BadSamples | None = None, **changes: Any) -> DocumentIndex:
        store = open_store(directory, layout)
        arguments: dict[str, Any] = {"cache": tmp_path / "cache", "num_workers": 3}
        arguments |= {"bad_samples": BadSamples(2) if bad is None else bad} | changes
        return build_index(store, **arguments)

    return build


def test_index_of_a_directory(
    tmp_path: Path, document: Make, write: Write, index_of: Callable[..., DocumentIndex]
) -> None:
    documents = [document(9, 0, prompt=4), document(1, 1), document(6, 2, prompt=0)]
    documents[0]["loss_mask"][6] = 0
    index = index_of(write(tmp_path / "s", documents))
    assert index.files == ("data_0.pt", "data_2.pt")
    assert index.lengths.tolist() == [9, 6]
    assert index.runs.bounds.tolist() == [[4, 6], [7, 9], [0, 6]]
    assert index.runs.totals().tolist() == [4, 6]
    assert index.too_short == 1
    assert index.dtype is torch.bfloat16
    assert [index.file_name(d) for d in range(2)] == list(index.files)


def test_copied_and_renumbered_directory_is_the_same_data(
    tmp_path: Path, document: Make, write: Write, index_of: Callable[..., DocumentIndex]
) -> None:
    shards = write(tmp_path / "s", [document(8, seed) for seed in range(20)])
    index = index_of(shards)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for i in range(20):
        shutil.copy(shards / f"data_{i}.pt", moved / f"data_{100 - i}.pt")
        os.utime(moved / f"data_{100 - i}.pt", (1, 1))
    copied = index_of(moved)
    assert copied.fingerprint == index.fingerprint
    held_out, held_out_copy = (validation_documents(i.prompt_hash, 0.3) for i in (index, copied))
    assert held_out_copy[::-1].tolist() == held_out.tolist()


def test_recapture_of_other_tokens_is_other_data(
    tmp_path: Path, document: Make, write: Write, index_of: Callable[..., DocumentIndex]
) -> None:
    one = index_of(write(tmp_path / "a", [document(8, 0), document(8, 1)]))
    other = index_of(write(tmp_path / "b", [document(8, 0), document(8, 2)]))
    assert one.fingerprint != other.fingerprint


def test_prompt_hash(
    tmp_path: Path, document: Make, write: Write, index_of: Callable[..., DocumentIndex]
) -> None:
    base, sibling, full, none, copy = (document(9, 0, prompt=4) for _ in range(5))
    other = document(9, 1, prompt=0)
    sibling["input_ids"][4:] = (sibling["input_ids"][4:] + 1) % 50
    full["loss_mask"].fill_(1)
    none["loss_mask"].zero_()
    copy["loss_mask"][5:] = 0
    hashes = index_of(write(tmp_path / "s", [base, sibling, full, none, copy, other])).prompt_hash
    assert hashes[0] == hashes[1] == hashes[4], "the same prompt"
    assert hashes[2] == hashes[3], "all ids, since nothing comes before the first supervised token"
    assert len({hashes[0], hashes[2], hashes[5]}) == 3


@given(hashes=HASHES, ratio=st.floats(0, 1), order=st.randoms())
def test_validation_holds_out_whole_prompts(hashes: np.ndarray, ratio: float, order: Any) -> None:
    hashes = np.concatenate([hashes, hashes[:5]])
    held_out = validation_documents(hashes, ratio)
    inside, outside = set(hashes[held_out].tolist()), set(hashes[~held_out].tolist())
    assert not inside & outside
    if ratio > 0 and len(inside | outside) >= 2:
        assert inside
        assert outside
    shuffled = list(range(len(hashes)))
    order.shuffle(shuffled)
    assert validation_documents(hashes[shuffled], ratio).tolist() == held_out[shuffled].tolist()


def test_validation_share_is_the_ratio() -> None:
    hashes = np.random.default_rng(0).integers(0, 2**64, 20_000, dtype=np.uint64)
    held_out = validation_documents(hashes, 0.05)
    assert held_out.mean() == pytest.approx(0.05, abs=0.005)
    assert (held_out <= validation_documents(hashes, 0.1)).all(), "a larger share keeps the smaller"
    assert not validation_documents(hashes, 0.0).any()


@pytest.mark.parametrize("limit", [1, 3])
def test_bad_files_are_listed_and_limited(
    tmp_path: Path,
    document: Make,
    write: Write,
    truncate: Callable[[Path], None],
    index_of: Callable[..., DocumentIndex],
    limit: int,
) -> None:
    other_width, other_dtype = document(6, 7), document(6, 8, dtype=torch.float32)
    other_width["hidden_states"] = [s[:, :3] for s in other_width["hidden_states"]]
    shards = write(tmp_path / "s", [document(6, 0), document(6, 1), other_width, other_dtype])
    truncate(shards / "data_0.pt")
    bad = BadSamples(limit)
    if limit < 3:
        with pytest.raises(DataError, match=r"2 bad samples, data\.max_bad_samples allows 1"):
            index_of(shards, bad)
        return
    assert index_of(shards, bad).files == ("data_1.pt",)
    assert len(bad) == 3
    for line, (name, what) in zip(
        bad.lines,
        [
            ("data_0.pt", "cut off"),
            ("data_2.pt", "hidden size"),
            ("data_3.pt", "found float32, expected bfloat16"),
        ],
        strict=True,
    ):
        assert name in line
        assert what in line


def test_all_files_bad(
    tmp_path: Path, write: Write, index_of: Callable[..., DocumentIndex], document: Make
) -> None:
    shards = write(tmp_path / "s", [document(6), document(6)])
    for path in shards.iterdir():
        path.write_bytes(b"")
    with pytest.raises(DataError, match="2 of them bad"):
        index_of(shards)


def test_only_too_short_documents(
    tmp_path: Path, document: Make, write: Write, index_of: Callable[..., DocumentIndex]
) -> None:
    with pytest.raises(DataError, match="1 documents shorter than two tokens"):
        index_of(write(tmp_path / "s", [document(1)]))


def test_other_layout_in_the_first_readable_file_is_a_config_mistake(
    tmp_path: Path,
    document: Make,
    write: Write,
    truncate: Callable[[Path], None],
    index_of: Callable[..., DocumentIndex],
) -> None:
    three = [document(6, seed) for seed in range(3)]
    for d in three:
        d["hidden_states"].pop(0)
    shards = write(tmp_path / "s", three)
    truncate(shards / "data_0.pt")
    with pytest.raises(LayoutError, match=r"(?s)data_1\.pt.*found 3 tensors.*do not belong"):
        index_of(shards, BadSamples(100))


def test_dangling_link_is_a_bad_file(
    tmp_path: Path, document: Make, write: Write, index_of: Callable[..., DocumentIndex]
) -> None:
    shards = write(tmp_path / "s", [document(6)])
    (shards / "data_1.pt").symlink_to(tmp_path / "gone")
    bad = BadSamples(1)
    assert len(index_of(shards, bad)) == 1
    assert "data_1.pt: cannot be read" in bad.lines[0]


def test_file_that_went_away_after_it_was_listed_is_a_bad_file(
    tmp_path: Path, document: Make, write: Write, layout: StateLayout
) -> None:
    store = open_store(write(tmp_path / "s", [document(6), document(7)]), layout)
    (tmp_path / "s" / "data_0.pt").unlink()
    bad = BadSamples(1)
    assert build_index(store, tmp_path / "cache", bad, 1).files == ("data_1.pt",)
    assert "data_0.pt: cannot be read" in bad.lines[0]


@pytest.mark.parametrize("number", [1, 2, 5])
def test_first_documents_only(
    tmp_path: Path,
    document: Make,
    write: Write,
    index_of: Callable[..., DocumentIndex],
    number: int,
) -> None:
    shards = write(tmp_path / "s", [document(6, seed) for seed in range(4)])
    index = index_of(shards, max_samples=number)
    assert index.files == tuple(f"data_{i}.pt" for i in range(min(number, 4)))
    assert len(index_of(shards)) == 4, "another choice has an index of its own"


def test_version_zero_stops_at_once(
    tmp_path: Path, write: Write, document: Make, index_of: Callable[..., DocumentIndex]
) -> None:
    documents = [document(6, seed) for seed in range(3)]
    for d in documents:
        *aux, last = d.pop("hidden_states")
        d |= {"hidden_state": torch.cat(aux, dim=1), "target": last}
    with pytest.raises(LayoutError, match=r"data_0\.pt.*speculators v0"):
        index_of(write(tmp_path / "s", documents), BadSamples(100))
