"""Reading one document, and every way in which one can be wrong."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.data.formats import LayoutError, SpeculatorsV1, StateLayout
from eagle3.errors import DataError

Make = Callable[..., dict[str, Any]]
Write = Callable[..., Path]


class Intruder:
    """Runs code when it is unpickled by the usual loader."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("intruder_was_here",)


@pytest.fixture
def stored(tmp_path: Path, layout: StateLayout) -> Callable[[Any], SpeculatorsV1]:
    """A directory with one document as ``data_0.pt``."""

    def make(content: Any) -> SpeculatorsV1:
        torch.save(content, tmp_path / "data_0.pt")
        return SpeculatorsV1(tmp_path, layout)

    return make


def test_range_of_a_document(document: Make, stored: Callable[[Any], SpeculatorsV1]) -> None:
    content = document(9, prompt=2)
    sample = stored(content).read("data_0.pt", 3, 7)
    assert torch.equal(sample.input_ids, content["input_ids"])
    assert sample.loss_mask.dtype is torch.bool
    assert sample.loss_mask.tolist() == [False] * 2 + [True] * 7
    assert len(sample.aux_hidden) == 3
    for found, expected in zip(
        (*sample.aux_hidden, sample.last_hidden), content["hidden_states"], strict=True
    ):
        assert torch.equal(found, expected[3:7])


def test_documents_come_in_numeric_order(
    tmp_path: Path, document: Make, layout: StateLayout
) -> None:
    for i in (10, 2, 0):
        torch.save(document(4), tmp_path / f"data_{i}.pt")
    (tmp_path / "token_freq.pt").write_bytes(b"")
    (tmp_path / "data_config.json").write_text("{}")
    names = SpeculatorsV1(tmp_path, layout).names
    assert names == ("data_0.pt", "data_2.pt", "data_10.pt")


def test_batch_axis_of_one_is_dropped(
    document: Make, stored: Callable[[Any], SpeculatorsV1]
) -> None:
    content = document(5)
    batched = {
        "input_ids": content["input_ids"][None],
        "loss_mask": content["loss_mask"][None],
        "hidden_states": [state[None] for state in content["hidden_states"]],
    }
    sample = stored(batched).read("data_0.pt", 0, 5)
    assert torch.equal(sample.input_ids, content["input_ids"])
    assert torch.equal(sample.last_hidden, content["hidden_states"][-1])


def without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda d: {k: v for k, v in d.items() if k != key}


def states(change: Callable[[list[torch.Tensor]], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda d: d | {"hidden_states": change(d["hidden_states"])}


def field(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda d: d | {key: value}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(without("loss_mask"), "key 'loss_mask' is missing", id="no mask"),
        pytest.param(without("hidden_states"), "key 'hidden_states' is missing", id="no states"),
        pytest.param(lambda d: list(d), "found list, expected a dict", id="not a dict"),
        pytest.param(states(lambda s: s[:3]), "found 3 tensors, expected 4", id="three tensors"),
        pytest.param(states(torch.stack), "one stacked tensor [4, 4, 4]", id="stacked, ambiguous"),
        pytest.param(states(lambda s: [t[:-1] for t in s]), "found 3 rows, expected 4", id="n-1"),
        pytest.param(
            states(lambda s: [t[:, :-1] for t in s]), "hidden size 3, expected 4", id="hidden size"
        ),
        pytest.param(states(lambda s: [t.long() for t in s]), "found torch.int64", id="dtype"),
        pytest.param(
            states(lambda s: [s[0].float(), *s[1:]]), "torch.bfloat16 and torch.float32", id="mixed"
        ),
        pytest.param(
            states(lambda s: [torch.stack([t, t]) for t in s]), "shape [2, 4, 4]", id="batch of 2"
        ),
        pytest.param(states(lambda s: {"a": s}), "found dict", id="states in a dict"),
        pytest.param(
            field("loss_mask", torch.ones(3)), "found length 3, expected 4", id="mask length"
        ),
        pytest.param(
            field("loss_mask", torch.tensor([0, 1, 2, 1])), "other than 0 and 1", id="mask values"
        ),
        pytest.param(field("loss_mask", [0, 1, 1, 1]), "found list", id="mask is a list"),
        pytest.param(
            field("input_ids", torch.tensor([0, 50, 1, 2])), "0..50, expected 0..49", id="id above"
        ),
        pytest.param(
            field("input_ids", torch.tensor([0, -1, 1, 2])), "-1..2, expected", id="id below"
        ),
        pytest.param(field("input_ids", torch.rand(4)), "found torch.float32", id="ids dtype"),
    ],
)
def test_bad_document_has_its_own_message(
    document: Make,
    stored: Callable[[Any], SpeculatorsV1],
    change: Callable[[dict[str, Any]], Any],
    expected: str,
) -> None:
    reader = stored(change(document(4)))
    with pytest.raises(DataError) as caught:
        reader.open("data_0.pt")
    message = str(caught.value)
    assert expected in message
    assert "data_0.pt" in message
    assert "found" in message
    assert "expected" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_states_that_are_not_finite_are_found_where_they_are_read(
    document: Make, stored: Callable[[Any], SpeculatorsV1], value: float, dtype: torch.dtype
) -> None:
    content = document(40, dtype=dtype)
    content["hidden_states"][1][20, 2] = value
    reader = stored(content)
    assert len(reader.read("data_0.pt", 0, 20)) == 40
    with pytest.raises(DataError, match=r"NaN or inf in tokens 15\.\.29"):
        reader.read("data_0.pt", 15, 30)


def test_largest_finite_states_are_accepted(
    document: Make, stored: Callable[[Any], SpeculatorsV1]
) -> None:
    content = document(40)
    content["hidden_states"][0].fill_(torch.finfo(torch.bfloat16).max)
    assert len(stored(content).read("data_0.pt", 0, 40)) == 40


@pytest.mark.parametrize("directory", ["missing", "empty", "foreign"])
def test_directory_without_documents(tmp_path: Path, layout: StateLayout, directory: str) -> None:
    path = tmp_path / directory
    expected = {
        "missing": "no such directory",
        "empty": "an empty directory",
        "foreign": "hs_0.safetensors",
    }[directory]
    if directory != "missing":
        path.mkdir()
    if directory == "foreign":
        (path / "hs_0.safetensors").touch()
    with pytest.raises(DataError, match=r"paths\.shards") as caught:
        SpeculatorsV1(path, layout)
    assert expected in str(caught.value)


def test_truncated_file(
    tmp_path: Path, layout: StateLayout, document: Make, write: Write, truncate: Callable[..., None]
) -> None:
    reader = SpeculatorsV1(write(tmp_path / "s", [document(50)]), layout)
    truncate(tmp_path / "s" / "data_0.pt")
    with pytest.raises(DataError, match="cut off or damaged"):
        reader.open("data_0.pt")


@pytest.mark.parametrize("content", [b"", b"not a tensor file at all"], ids=["empty", "text"])
def test_file_of_another_kind(tmp_path: Path, layout: StateLayout, content: bytes) -> None:
    (tmp_path / "data_0.pt").write_bytes(content)
    with pytest.raises(DataError, match=r"data_0\.pt: found .* bytes that are not a torch\.save"):
        SpeculatorsV1(tmp_path, layout).open("data_0.pt")


def test_file_that_went_away(
    tmp_path: Path, layout: StateLayout, document: Make, write: Write
) -> None:
    reader = SpeculatorsV1(write(tmp_path / "s", [document(5)]), layout)
    (tmp_path / "s" / "data_0.pt").unlink()
    with pytest.raises(DataError, match="cannot be read"):
        reader.open("data_0.pt")


def test_code_in_a_file_is_not_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    document: Make,
    stored: Callable[[Any], SpeculatorsV1],
) -> None:
    monkeypatch.chdir(tmp_path)
    reader = stored(document(4) | {"extra": Intruder()})
    with pytest.raises(DataError, match="could run code"):
        reader.open("data_0.pt")
    assert not (tmp_path / "intruder_was_here").exists()


def test_layout_mistakes_are_told_apart(
    document: Make, stored: Callable[[Any], SpeculatorsV1]
) -> None:
    content = document(4)
    content["hidden_states"].pop()
    with pytest.raises(LayoutError, match=r"model\.num_aux_layers=2"):
        stored(content).open("data_0.pt")
