"""Maps on disk: every form, refusal of maps that do not fit, and whose tokenizer they are for."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from eagle3.data.tokenizer_fingerprint import read_tokenizer
from eagle3.data.vocab import VocabMap
from eagle3.data.vocab_files import (
    MapOrigin,
    check_tokenizer,
    load_vocab_map,
    read_origin,
    read_vocab_map,
    save_vocab_map,
)
from eagle3.errors import DataError


@pytest.fixture
def vocab_map() -> VocabMap:
    return VocabMap.from_selected([0, 2, 3, 7, 8], 12)


def save_as(form: str, directory: Path, d2t: torch.Tensor, t2d: torch.Tensor) -> Path:
    """Write a map in one of the accepted forms."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {"d2t": d2t, "t2d": t2d}
    if form == "safetensors":
        save_file(tensors, directory / "map.safetensors")
        return directory / "map.safetensors"
    if form == "pt":
        torch.save(tensors, directory / "map.pt")
        return directory / "map.pt"
    for name, tensor in tensors.items():
        if form == "directory of pt":
            torch.save(tensor, directory / f"{name}.pt")
        else:
            suffix = f"-{len(d2t)}" if form == "directory with sizes" else ""
            np.save(directory / f"{name}{suffix}.npy", tensor.numpy())
    return directory


@pytest.mark.parametrize(
    "form",
    ["safetensors", "pt", "directory of pt", "directory of npy", "directory with sizes"],
)
def test_every_stored_form_is_read(tmp_path: Path, vocab_map: VocabMap, form: str) -> None:
    path = save_as(form, tmp_path, vocab_map.d2t, vocab_map.t2d)
    found = load_vocab_map(path, 5, 12)
    assert torch.equal(found.d2t, vocab_map.d2t)
    assert torch.equal(found.t2d, vocab_map.t2d)


def test_saved_map_is_read_back(tmp_path: Path, vocab_map: VocabMap) -> None:
    save_vocab_map(tmp_path / "new" / "map.safetensors", vocab_map)
    found = load_vocab_map(tmp_path / "new" / "map.safetensors", 5, 12)
    assert torch.equal(found.selected, vocab_map.selected)


def with_values(**changes: torch.Tensor) -> Callable[[VocabMap], dict[str, torch.Tensor]]:
    return lambda m: {"d2t": m.d2t, "t2d": m.t2d} | changes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            lambda m: {"d2t": m.selected, "t2d": m.t2d}, "it looks absolute", id="absolute"
        ),
        pytest.param(with_values(d2t=torch.zeros(5, dtype=torch.int64)), "t2d selects", id="zeros"),
        pytest.param(
            with_values(d2t=torch.tensor([0, 1, 1, 4, 8])), r"0\.\.12, expected 0\.\.11", id="range"
        ),
        pytest.param(with_values(d2t=torch.tensor([3, 1, 1, 4, 4])), "ascend", id="not ascending"),
        pytest.param(
            with_values(d2t=torch.tensor([0, 1, 1, 4, 5])),
            "id 9 for draft id 4",
            id="contradiction",
        ),
        pytest.param(with_values(d2t=torch.zeros(5)), "torch.float32", id="d2t dtype"),
        pytest.param(with_values(t2d=torch.ones(12)), "expected a bool mask", id="t2d dtype"),
        pytest.param(
            with_values(t2d=torch.ones(12, dtype=torch.bool)), "12 selected tokens", id="t2d sum"
        ),
        pytest.param(with_values(d2t=torch.zeros(4, dtype=torch.int64)), "sizes 4", id="d2t size"),
        pytest.param(
            with_values(t2d=torch.ones(9, dtype=torch.bool)), "sizes 5 and 9", id="t2d size"
        ),
    ],
)
def test_map_that_does_not_fit_is_refused(
    tmp_path: Path,
    vocab_map: VocabMap,
    change: Callable[[VocabMap], dict[str, torch.Tensor]],
    message: str,
) -> None:
    path = save_as("safetensors", tmp_path, **change(vocab_map))
    with pytest.raises(DataError, match=message) as caught:
        load_vocab_map(path, 5, 12)
    assert str(path) in str(caught.value)
    assert "expected" in str(caught.value)


def test_map_of_another_size_names_the_settings(tmp_path: Path, vocab_map: VocabMap) -> None:
    path = save_as("pt", tmp_path, vocab_map.d2t, vocab_map.t2d)
    with pytest.raises(DataError, match=r"16 \(model\.draft_vocab_size\) and 64"):
        load_vocab_map(path, 16, 64)


@pytest.mark.parametrize("draft_size", [12, 16])
def test_padded_vocabulary_takes_the_identity_only(
    tmp_path: Path, vocab_map: VocabMap, draft_size: int
) -> None:
    identity = VocabMap.identity(12)
    path = save_as("safetensors", tmp_path / "a", identity.d2t, identity.t2d)
    assert load_vocab_map(path, draft_size, 12).draft_size == 12
    path = save_as("safetensors", tmp_path / "b", vocab_map.d2t, vocab_map.t2d)
    with pytest.raises(DataError, match="sizes 5 and 12, expected 12"):
        load_vocab_map(path, draft_size, 12)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        pytest.param("gone.safetensors", None, "cannot be read", id="missing"),
        pytest.param("map.safetensors", b"junk", "cannot be read", id="damaged safetensors"),
        pytest.param("map.pt", b"junk", "tensors only", id="damaged pt"),
    ],
)
def test_unreadable_map(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_vocab_map(tmp_path / name, 5, 12)


@pytest.mark.parametrize(
    "content", [{"d2t": torch.zeros(5)}, torch.zeros(5)], ids=["key", "tensor"]
)
def test_file_without_both_tensors(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "map.pt")
    with pytest.raises(DataError, match="expected tensors d2t and t2d"):
        load_vocab_map(tmp_path / "map.pt", 5, 12)


def test_directory_names_what_it_looked_for(tmp_path: Path, vocab_map: VocabMap) -> None:
    with pytest.raises(DataError, match=r"d2t\.npy, d2t\.pt, d2t-5\.npy"):
        load_vocab_map(tmp_path, 5, 12)
    save_as("directory of npy", tmp_path, vocab_map.d2t, vocab_map.t2d)
    save_as("directory of pt", tmp_path, vocab_map.d2t, vocab_map.t2d)
    with pytest.raises(DataError, match=r"found d2t\.npy, d2t\.pt of"):
        load_vocab_map(tmp_path, 5, 12)
    (tmp_path / "d2t.pt").unlink()
    (tmp_path / "t2d.pt").unlink()
    (tmp_path / "d2t.npy").write_bytes(b"junk")
    with pytest.raises(DataError, match="one array"):
        load_vocab_map(tmp_path, 5, 12)


def test_a_map_of_another_size_is_named(tmp_path: Path) -> None:
    path = tmp_path / "for_8.safetensors"
    save_vocab_map(path, VocabMap.from_selected(range(8), 64))
    with pytest.raises(DataError, match=r"sizes 8 and 64, expected 16") as caught:
        load_vocab_map(path, 16, 64)
    assert str(path) in str(caught.value)
    assert "paths.vocab_map" in str(caught.value)


@pytest.mark.parametrize(
    "form",
    ["safetensors", "pt", "directory of pt", "directory of npy", "directory with sizes"],
)
def test_a_map_is_read_without_knowing_its_size(
    tmp_path: Path, vocab_map: VocabMap, form: str
) -> None:
    found = read_vocab_map(save_as(form, tmp_path, vocab_map.d2t, vocab_map.t2d))
    assert torch.equal(found.selected, vocab_map.selected)
    broken = save_as(form, tmp_path, vocab_map.selected, vocab_map.t2d)
    with pytest.raises(DataError, match="it looks absolute"):
        read_vocab_map(broken)


def test_a_directory_with_maps_of_two_sizes_is_ambiguous(
    tmp_path: Path, vocab_map: VocabMap
) -> None:
    other = VocabMap.from_selected([1, 2], 12)
    save_as("directory with sizes", tmp_path, vocab_map.d2t, vocab_map.t2d)
    save_as("directory with sizes", tmp_path, other.d2t, other.t2d)
    with pytest.raises(DataError, match=r"found d2t-2\.npy, d2t-5\.npy of"):
        read_vocab_map(tmp_path)
    assert load_vocab_map(tmp_path, 5, 12).draft_size == 5


ORIGIN = MapOrigin("00ff", "abcd", "Kimi-K2.5", 123_456)


def test_the_origin_stands_in_the_header(tmp_path: Path, vocab_map: VocabMap) -> None:
    path = tmp_path / "map.safetensors"
    save_vocab_map(path, vocab_map, ORIGIN)
    assert read_origin(path) == ORIGIN
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["eagle3"])
    assert (header["draft_size"], header["verifier_size"]) == (5, 12)
    assert header["counted_tokens"] == 123_456
    assert [file.name for file in tmp_path.iterdir()] == ["map.safetensors"]


@pytest.mark.parametrize("form", ["safetensors", "pt", "directory of npy"])
def test_a_foreign_map_records_nothing(tmp_path: Path, vocab_map: VocabMap, form: str) -> None:
    assert read_origin(save_as(form, tmp_path, vocab_map.d2t, vocab_map.t2d)) == MapOrigin()


@pytest.mark.parametrize("content", ["[]", "{"])
def test_a_damaged_header_is_named(tmp_path: Path, vocab_map: VocabMap, content: str) -> None:
    path = tmp_path / "map.safetensors"
    save_file({"d2t": vocab_map.d2t, "t2d": vocab_map.t2d}, path, metadata={"eagle3": content})
    with pytest.raises(DataError, match="cannot be read"):
        read_origin(path)


def test_a_map_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, vocab_map: VocabMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "map.safetensors"
    save_vocab_map(path, vocab_map)

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, os.strerror(28), str(self))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(DataError, match=r"cannot be written .*No space left") as caught:
        save_vocab_map(path, VocabMap.identity(12))
    assert str(path) in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == ["map.safetensors"]
    assert load_vocab_map(path, 5, 12).draft_size == 5


def write_tokenizer(directory: Path, vocabulary: dict[str, int]) -> Path:
    directory.mkdir()
    content = {"model": {"type": "BPE", "vocab": vocabulary}, "added_tokens": []}
    (directory / "tokenizer.json").write_text(json.dumps(content))
    return directory


def test_a_map_of_another_tokenizer_is_refused_by_name(tmp_path: Path, vocab_map: VocabMap) -> None:
    """The same sizes, the same tokens, but ids 1 and 2 exchanged."""
    ours = write_tokenizer(tmp_path / "ours", {"a": 0, "b": 1, "c": 2})
    theirs = write_tokenizer(tmp_path / "theirs", {"a": 0, "b": 2, "c": 1})
    tokenizer = read_tokenizer(theirs)
    assert tokenizer is not None
    path = tmp_path / "map.safetensors"
    origin = MapOrigin(tokenizer_fingerprint=tokenizer.fingerprint, tokenizer_name=tokenizer.name)
    save_vocab_map(path, vocab_map, origin)
    assert "the verifier's" in check_tokenizer(path, theirs)
    assert "the verifier's" in check_tokenizer(path, theirs / "tokenizer.json")
    with pytest.raises(DataError) as caught:
        check_tokenizer(path, ours)
    message = str(caught.value)
    assert all(part in message for part in (str(path), "theirs", str(ours), "shards vocab"))


def test_what_is_not_recorded_is_said(tmp_path: Path, vocab_map: VocabMap) -> None:
    (tmp_path / "verifier").mkdir()
    known = write_tokenizer(tmp_path / "known", {"a": 0})
    save_vocab_map(tmp_path / "map.safetensors", vocab_map)
    assert "not recorded" in check_tokenizer(tmp_path / "map.safetensors", known)
    save_vocab_map(tmp_path / "map.safetensors", vocab_map, ORIGIN)
    line = check_tokenizer(tmp_path / "map.safetensors", tmp_path / "verifier")
    assert "holds no tokenizer" in line
