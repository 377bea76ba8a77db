"""Reading one document, and every way in which one can be wrong."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.data.formats import open_store
from eagle3.data.index import index_records
from eagle3.data.layout import LayoutError, StateLayout
from eagle3.data.reading import StateReader
from eagle3.data.safetensors_file import SafetensorsFile
from eagle3.data.sample import Sample
from eagle3.data.speculators import list_states
from eagle3.data.speculators_v1 import SpeculatorsV1, list_documents
from eagle3.data.store import DocumentRecord
from eagle3.data.torch_zip import TorchZip
from eagle3.errors import DataError

Make = Callable[..., dict[str, Any]]
Write = Callable[..., Path]


class Intruder:
    """Runs code when it is unpickled by the usual loader."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("intruder_was_here",)


class Stored:
    """A directory with one document as ``data_0.pt``."""

    def __init__(self, directory: Path, layout: StateLayout) -> None:
        self.store = SpeculatorsV1(directory, layout)

    def probe(self) -> DocumentRecord:
        (record,) = self.store.probe("data_0.pt")
        return record

    def read(self, start: int, stop: int) -> Sample:
        index = index_records([self.probe()])
        return StateReader(self.store, index).sample(0, start, stop)


@pytest.fixture
def stored(tmp_path: Path, layout: StateLayout) -> Callable[[Any], Stored]:
    def make(content: Any) -> Stored:
        torch.save(content, tmp_path / "data_0.pt")
        return Stored(tmp_path, layout)

    return make


def test_range_of_a_document(document: Make, stored: Callable[[Any], Stored]) -> None:
    content = document(9, prompt=2)
    sample = stored(content).read(3, 7)
    assert torch.equal(sample.input_ids, content["input_ids"])
    assert sample.loss_mask.dtype is torch.bool
    assert sample.loss_mask.tolist() == [False] * 2 + [True] * 7
    *aux, last = (state[3:7] for state in content["hidden_states"])
    assert torch.equal(sample.aux_hidden, torch.cat(aux, dim=1))
    assert torch.equal(sample.last_hidden, last)


def test_documents_come_in_numeric_order_and_other_names_are_left_alone(
    tmp_path: Path, document: Make, layout: StateLayout
) -> None:
    for i in (10, 2, 0):
        torch.save(document(4), tmp_path / f"data_{i}.pt")
    for name in ("token_freq.pt", "data_1.pt.tmp", ".data_3.pt.tmp", "data_x.pt", "xdata_4.pt"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "data_config.json").write_text("{}")
    store = open_store(tmp_path, layout)
    assert isinstance(store, SpeculatorsV1)
    assert store.files == ("data_0.pt", "data_2.pt", "data_10.pt")
    assert list_documents(tmp_path / "missing") == ()


def batched(content: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_ids": content["input_ids"][None],
        "loss_mask": content["loss_mask"][None],
        "hidden_states": [state[None] for state in content["hidden_states"]],
    }


def one_storage(content: dict[str, Any]) -> dict[str, Any]:
    """States that are rows of one saved tensor, behind rows of another document."""
    states = content["hidden_states"]
    joined = torch.cat([torch.full_like(states[0][:3], 9.0), *states])
    return content | {"hidden_states": list(joined[3:].split(len(states[0])))}


def one_id_storage(content: dict[str, Any]) -> dict[str, Any]:
    """Token ids and mask that are parts of one saved tensor."""
    joined = torch.cat([torch.tensor([7]), content["input_ids"], content["loss_mask"]])
    _, ids, mask = joined.split([1, len(content["input_ids"]), len(content["loss_mask"])])
    return content | {"input_ids": ids, "loss_mask": mask}


ACCEPTED = [
    pytest.param(lambda d: d, id="as written by the capture"),
    pytest.param(batched, id="batch axis of one"),
    pytest.param(one_storage, id="states in one storage"),
    pytest.param(one_id_storage, id="ids and mask in one storage"),
    pytest.param(lambda d: d | {"input_ids": d["input_ids"].int()}, id="int32 ids"),
    pytest.param(lambda d: d | {"loss_mask": d["loss_mask"].bool()}, id="bool mask"),
    pytest.param(lambda d: d | {"loss_mask": d["loss_mask"].float()}, id="float mask"),
    pytest.param(
        lambda d: d | {"hidden_states": tuple(s.float() for s in d["hidden_states"])},
        id="float32 states in a tuple",
    ),
    pytest.param(lambda d: dict(reversed(d.items())), id="other order of keys"),
    pytest.param(
        lambda d: d | {"source": "chat", "turns": [1, 2.5, None, True], "sum": {"of": (1, 2)}},
        id="more keys of plain values",
    ),
]


@pytest.mark.parametrize("change", ACCEPTED)
@pytest.mark.parametrize("tokens", [5, 300])
def test_document_is_what_torch_loads(
    tmp_path: Path,
    document: Make,
    stored: Callable[[Any], Stored],
    change: Callable[[dict[str, Any]], dict[str, Any]],
    tokens: int,
) -> None:
    sample = stored(change(document(tokens))).read(2, tokens)
    loaded = torch.load(tmp_path / "data_0.pt", weights_only=True)
    *aux, last = (state.reshape(tokens, -1)[2:] for state in loaded["hidden_states"])
    assert torch.equal(sample.input_ids, loaded["input_ids"].flatten().long())
    assert torch.equal(sample.loss_mask, loaded["loss_mask"].flatten().bool())
    assert torch.equal(sample.aux_hidden, torch.cat(aux, dim=1))
    assert torch.equal(sample.last_hidden, last)


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
        pytest.param(states(lambda s: [t.long() for t in s]), "found int64", id="dtype"),
        pytest.param(states(lambda s: [s[0].float(), *s[1:]]), "bfloat16 and float32", id="mixed"),
        pytest.param(
            states(lambda s: [torch.stack([t, t]) for t in s]), "shape [2, 4, 4]", id="batch of 2"
        ),
        pytest.param(states(lambda s: {"a": s}), "found dict", id="states in a dict"),
        pytest.param(
            states(lambda s: [t.T.contiguous().T for t in s]), "view with strides", id="transposed"
        ),
        pytest.param(
            field("input_ids", torch.arange(8)[::2]), "view with strides [2]", id="every other id"
        ),
        pytest.param(
            states(lambda s: [*s[:3], s[3].tolist()]), "found list", id="a state is a list"
        ),
        pytest.param(lambda d: d["input_ids"], "found a tensor, expected a dict", id="a tensor"),
        pytest.param(
            field("loss_mask", torch.full((4,), float("nan"))), "than 0 and 1", id="mask of NaN"
        ),
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
        pytest.param(field("input_ids", torch.rand(4)), "found float32", id="ids dtype"),
    ],
)
def test_bad_document_has_its_own_message(
    document: Make,
    stored: Callable[[Any], Stored],
    change: Callable[[dict[str, Any]], Any],
    expected: str,
) -> None:
    reader = stored(change(document(4)))
    with pytest.raises(DataError) as caught:
        reader.probe()
    message = str(caught.value)
    assert expected in message
    assert "data_0.pt" in message
    assert "found" in message
    assert "expected" in message


def test_layout_of_version_zero_is_named(document: Make, stored: Callable[[Any], Stored]) -> None:
    content = document(4)
    *aux, last = content.pop("hidden_states")
    old = content | {"hidden_state": torch.cat(aux, dim=1), "target": last}
    with pytest.raises(
        LayoutError, match=r"speculators v0.*hidden_state\.split\(hidden_size, -1\)"
    ):
        stored(old).probe()
    split = [s.contiguous() for s in old["hidden_state"].split(4, -1)]
    sample = stored(content | {"hidden_states": [*split, old["target"]]}).read(0, 4)
    assert torch.equal(sample.aux_hidden, old["hidden_state"]), "as the message says"


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("tokens", [4, 9])
def test_stacked_states_are_refused_whatever_their_axes(
    document: Make, stored: Callable[[Any], Stored], axis: int, tokens: int
) -> None:
    content = document(tokens)
    content["hidden_states"] = torch.stack(content["hidden_states"], dim=axis)
    with pytest.raises(LayoutError, match="which axis counts layers is ambiguous"):
        stored(content).probe()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_states_that_are_not_finite_are_found_where_they_are_read(
    document: Make, stored: Callable[[Any], Stored], value: float, dtype: torch.dtype
) -> None:
    content = document(40, dtype=dtype)
    content["hidden_states"][1][20, 2] = value
    reader = stored(content)
    assert len(reader.read(0, 20)) == 40
    with pytest.raises(DataError, match="NaN or inf"):
        reader.read(15, 30)


def test_largest_finite_states_are_accepted(
    document: Make, stored: Callable[[Any], Stored]
) -> None:
    content = document(40)
    content["hidden_states"][0].fill_(torch.finfo(torch.bfloat16).max)
    assert len(stored(content).read(0, 40)) == 40


@pytest.mark.parametrize("directory", ["missing", "empty", "foreign"])
def test_directory_without_documents(tmp_path: Path, layout: StateLayout, directory: str) -> None:
    path = tmp_path / directory
    expected = {
        "missing": "no such directory",
        "empty": "an empty directory",
        "foreign": "model.safetensors",
    }[directory]
    if directory != "missing":
        path.mkdir()
    if directory == "foreign":
        (path / "model.safetensors").touch()
    with pytest.raises(DataError, match=r"paths\.shards") as caught:
        open_store(path, layout)
    assert expected in str(caught.value)


def test_truncated_file(
    tmp_path: Path, document: Make, stored: Callable[[Any], Stored], truncate: Callable[..., None]
) -> None:
    reader = stored(document(50))
    truncate(tmp_path / "data_0.pt")
    with pytest.raises(DataError, match=r"data_0\.pt.*cut off or damaged"):
        reader.probe()


@pytest.mark.parametrize("content", [b"", b"not a tensor file at all"], ids=["empty", "text"])
def test_file_of_another_kind(tmp_path: Path, layout: StateLayout, content: bytes) -> None:
    (tmp_path / "data_0.pt").write_bytes(content)
    with pytest.raises(DataError, match=r"data_0\.pt: found .* bytes that are not a torch\.save"):
        Stored(tmp_path, layout).probe()


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("make", "expected"),
    [(Path.mkdir, "a directory, no file"), (make_pipe, "a named pipe or a device, no file")],
    ids=["directory", "pipe"],
)
@pytest.mark.parametrize("name", ["data_1.pt", "hs_1.safetensors"])
def test_what_is_no_file_is_a_bad_sample(
    tmp_path: Path, layout: StateLayout, make: Callable[[Path], None], expected: str, name: str
) -> None:
    """It is neither passed over nor waited for."""
    make(tmp_path / name)
    reader = TorchZip if name.endswith(".pt") else SafetensorsFile
    with pytest.raises(DataError, match=rf"{name}: cannot be read \({expected}\)"):
        reader(tmp_path / name)
    assert list_documents(tmp_path) + list_states(tmp_path) == (name,)


def test_native_directory_without_its_manifest(tmp_path: Path, layout: StateLayout) -> None:
    (tmp_path / "shard-00000.safetensors").touch()
    with pytest.raises(DataError, match=r"native directory without manifest\.json.*Copy it again"):
        open_store(tmp_path, layout)


def test_file_that_went_away_after_it_was_listed(
    tmp_path: Path, document: Make, stored: Callable[[Any], Stored]
) -> None:
    reader = stored(document(5))
    (tmp_path / "data_0.pt").unlink()
    with pytest.raises(DataError, match=r"data_0\.pt: cannot be read .*No such file"):
        reader.probe()


def test_file_that_may_not_be_read(
    tmp_path: Path, document: Make, stored: Callable[[Any], Stored]
) -> None:
    reader = stored(document(5))
    (tmp_path / "data_0.pt").chmod(0)
    if os.access(tmp_path / "data_0.pt", os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(DataError, match=r"data_0\.pt: cannot be read .*Permission denied"):
        reader.probe()


def test_file_that_was_replaced_after_it_was_listed_is_read_as_it_is(
    tmp_path: Path, document: Make, stored: Callable[[Any], Stored]
) -> None:
    reader = stored(document(5))
    first = reader.probe()
    torch.save(document(6, seed=1), tmp_path / "data_0.pt")
    assert (first.length, reader.probe().length) == (5, 6)


def test_code_in_a_file_is_not_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    document: Make,
    stored: Callable[[Any], Stored],
) -> None:
    monkeypatch.chdir(tmp_path)
    reader = stored(document(4) | {"extra": Intruder()})
    with pytest.raises(DataError, match="could run code"):
        reader.probe()
    assert not (tmp_path / "intruder_was_here").exists()


def test_layout_mistakes_are_told_apart(document: Make, stored: Callable[[Any], Stored]) -> None:
    content = document(4)
    content["hidden_states"].pop()
    with pytest.raises(LayoutError, match=r"model\.num_aux_layers=2"):
        stored(content).probe()
