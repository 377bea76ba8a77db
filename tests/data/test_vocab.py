"""Draft vocabulary: selection, storage, and refusal of maps that do not fit."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from eagle3.data.vocab import VocabMap, load_vocab_map, save_vocab_map
from eagle3.errors import ConfigError, DataError

GOLDEN = Path(__file__).parents[1] / "golden" / "vocab_mapping"
CASES = json.loads(GOLDEN.with_suffix(".json").read_text())["cases"]


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("form", ["mapping", "tensor"])
def test_selection_equals_the_golden(name: str, form: str) -> None:
    stored, case = load_file(GOLDEN.with_suffix(".safetensors")), CASES[name]
    tokens, counts = stored[f"{name}.tokens"].tolist(), stored[f"{name}.counts"].tolist()
    draft, verifier = case["draft_vocab_size"], case["target_vocab_size"]
    frequencies: dict[int, int] | torch.Tensor = dict(zip(tokens, counts, strict=True))
    if form == "tensor":
        frequencies = torch.zeros(verifier, dtype=torch.int64)
        frequencies[tokens] = torch.tensor(counts, dtype=torch.int64)
    vocab_map = VocabMap.from_frequencies(frequencies, draft, verifier)
    assert torch.equal(vocab_map.d2t, stored[f"{name}.d2t"])
    assert torch.equal(vocab_map.t2d, stored[f"{name}.t2d"])
    assert vocab_map.selected.tolist() == case["selected"]


@given(ids=st.sets(st.integers(0, 79), min_size=1))
def test_round_trip_between_vocabularies(ids: set[int]) -> None:
    vocab_map = VocabMap.from_selected(ids, 80)
    draft_ids = torch.arange(len(ids))
    assert vocab_map.to_verifier(draft_ids).tolist() == sorted(ids)
    assert torch.equal(vocab_map.selected, vocab_map.to_verifier(draft_ids))
    assert vocab_map.covers(torch.arange(80)).nonzero().flatten().tolist() == sorted(ids)
    assert (vocab_map.draft_size, vocab_map.verifier_size) == (len(ids), 80)


def test_no_token_is_not_covered() -> None:
    vocab_map = VocabMap.from_selected([1, 3], 4)
    found = vocab_map.covers(torch.tensor([[-1, 3], [1, 0]]))
    assert found.tolist() == [[False, True], [True, False]]


def test_rare_token_is_kept_on_request() -> None:
    counts = {token: 100 - token for token in range(90)}
    assert 95 not in VocabMap.from_frequencies(counts, 10, 100).selected
    kept = VocabMap.from_frequencies(counts, 10, 100, always_keep=(95, 3))
    assert kept.selected.tolist() == [*range(9), 95]


def test_few_tokens_are_filled_up() -> None:
    selected = VocabMap.from_frequencies(dict.fromkeys(range(40, 50), 1), 16, 100).selected
    assert selected.tolist() == [*range(6), *range(40, 50)]


@pytest.mark.parametrize("draft_size", [20, 30])
def test_full_vocabulary_is_the_identity(draft_size: int) -> None:
    vocab_map = VocabMap.from_frequencies({3: 1}, draft_size, 20)
    assert torch.equal(vocab_map.selected, torch.arange(20))
    assert vocab_map.t2d.all()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        pytest.param(lambda: VocabMap.from_selected([3, 3], 9), "repeated", id="repeated"),
        pytest.param(lambda: VocabMap.from_selected([3, 9], 9), r"3\.\.9", id="above"),
        pytest.param(lambda: VocabMap.from_frequencies({-1: 2}, 4, 9), r"-1\.\.-1", id="below"),
        pytest.param(
            lambda: VocabMap.from_frequencies(torch.ones(8), 4, 9), r"\[8\]", id="counts shape"
        ),
        pytest.param(
            lambda: VocabMap.from_frequencies({}, 2, 9, always_keep=(1, 2, 3)), "3 ids", id="keep"
        ),
    ],
)
def test_impossible_selection(build: Callable[[], VocabMap], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


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
