"""Values beside the tensors of a ``torch.save`` file: skipped where they could run no code."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle3.data.bad_samples import BadSamples
from eagle3.data.index import build_index
from eagle3.data.layout import StateLayout
from eagle3.data.pickle_values import Opaque
from eagle3.data.reading import StateReader
from eagle3.data.speculators_v1 import SpeculatorsV1
from eagle3.data.torch_zip import TorchZip
from eagle3.errors import DataError

Make = Callable[..., dict[str, Any]]
Write = Callable[..., Path]


def module_state() -> OrderedDict[str, Any]:
    """Of a module: an ordered dict with an attribute."""
    return torch.nn.Linear(2, 2).state_dict()


PLAIN = {
    "dtype": torch.bfloat16,
    "new dtype": torch.float8_e4m3fn,
    "device": torch.device("cuda", 1),
    "set": {1, "a"},
    "complex": 1 + 2j,
    "bytes": b"some \xff bytes",
    "empty bytes": b"",
    "bytearray": bytearray(b"more"),
    "size": torch.Size([2, 3]),
    "counter": Counter("aab"),
    "parameter": torch.nn.Parameter(torch.ones(3)),
    "complex tensor": torch.zeros(3, dtype=torch.complex64),
    "8-bit floats": torch.zeros(3).to(torch.float8_e5m2),
    "unsigned": torch.arange(5).to(torch.uint16),
    "unsigned and long": torch.zeros(2, dtype=torch.uint64),
    "sparse": torch.eye(3).to_sparse(),
    "module": module_state(),
    "nested": {"a": [torch.float16, {3}], "b": {"c": (b"x", torch.device("cpu"))}},
}


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("name", PLAIN)
def test_plain_values_are_skipped(
    tmp_path: Path, write: Write, document: Make, name: str, protocol: int
) -> None:
    """The document is read as if they were not there, wherever they stand."""
    sample = document(9)
    plain = SpeculatorsV1(write(tmp_path / "plain", [sample]), StateLayout(3, 4, 50))
    path = write(tmp_path / "more", []) / "data_0.pt"
    torch.save(
        {"before": PLAIN[name], **sample, "after": PLAIN[name]}, path, pickle_protocol=protocol
    )
    (record,) = SpeculatorsV1(path.parent, StateLayout(3, 4, 50)).probe("data_0.pt")
    (expected,) = plain.probe("data_0.pt")
    assert (record.sample_hash, record.length) == (expected.sample_hash, 9)
    for at, state in zip(record.state_offsets, sample["hidden_states"], strict=True):
        stored = path.read_bytes()[at : at + state.nbytes]
        assert stored == state.view(torch.uint8).numpy().tobytes()


def test_parameters_are_states_like_any_other(tmp_path: Path, write: Write, document: Make) -> None:
    sample = document(9)
    states = [torch.nn.Parameter(state) for state in sample["hidden_states"]]
    directory = write(tmp_path / "shards", [sample | {"hidden_states": states}])
    store = SpeculatorsV1(directory, StateLayout(3, 4, 50))
    index = build_index(store, tmp_path / "cache", BadSamples(0), 1)
    read = StateReader(store, index).sample(0)
    assert torch.equal(read.last_hidden, sample["hidden_states"][3])
    assert torch.equal(read.aux_hidden, torch.cat(sample["hidden_states"][:3], 1))


def test_unsigned_ids_of_16_bits_are_read_without_a_sign(
    tmp_path: Path, write: Write, document: Make
) -> None:
    sample = document(6)
    ids = torch.tensor([0, 1, 32_767, 32_768, 49_151, 7])
    stored = write(tmp_path / "shards", [sample | {"input_ids": ids.to(torch.uint16)}])
    store = SpeculatorsV1(stored, StateLayout(3, 4, 49_152))
    index = build_index(store, tmp_path / "cache", BadSamples(0), 1)
    assert torch.equal(StateReader(store, index).input_ids(0), ids)
    plain = SpeculatorsV1(write(tmp_path / "plain", [sample | {"input_ids": ids}]), store.layout)
    assert index.sample_hash[0] == plain.probe("data_0.pt")[0].sample_hash
    with pytest.raises(DataError, match=r"found token ids 0\.\.49151, expected 0\.\.49149"):
        SpeculatorsV1(stored, StateLayout(3, 4, 49_150)).probe("data_0.pt")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"input_ids": b"abc"}, "key 'input_ids': found _codecs.encode, expected a tensor"),
        ({"input_ids": torch.arange(9).to(torch.int16)}, "found int16, expected int64"),
        ({"loss_mask": torch.zeros(9, dtype=torch.complex64)}, "found complex64, expected int64"),
        ({"hidden_states": [torch.bfloat16]}, "found list of torch.bfloat16, expected a list of"),
        ({"hidden_states": [torch.ones(9, 4).to(torch.float8_e5m2)] * 4}, "found float8_e5m2"),
    ],
    ids=["ids", "signed ids", "mask", "states", "8-bit states"],
)
def test_what_is_needed_must_be_tensors_of_known_numbers(
    tmp_path: Path, write: Write, document: Make, change: dict[str, Any], expected: str
) -> None:
    store = SpeculatorsV1(write(tmp_path / "s", [document(9) | change]), StateLayout(3, 4, 50))
    with pytest.raises(DataError) as caught:
        store.probe("data_0.pt")
    assert expected in str(caught.value)
    assert "could run code" not in str(caught.value)


class Calls:
    """Pickled as a call of any function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    "value",
    [
        Path("a"),
        Calls(exec, "x"),
        Calls(getattr, "x", "upper"),
        Calls(torch.load, "x"),
        {Path("a")},
    ],
    ids=["path", "exec", "getattr", "load", "a path in a set"],
)
def test_what_could_run_code_is_refused_under_any_key(
    tmp_path: Path, write: Write, document: Make, value: Any, protocol: int
) -> None:
    path = write(tmp_path / "s", []) / "data_0.pt"
    torch.save(document(9) | {"notes": value}, path, pickle_protocol=protocol)
    with pytest.raises(DataError, match="not loaded, because it could run code"):
        SpeculatorsV1(path.parent, StateLayout(3, 4, 50)).probe("data_0.pt")


LEAVES = st.sampled_from([torch.int32, torch.device("cpu"), {1}, b"x", 2j, 1, None, 0.5, "text"])


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    extra=st.recursive(
        LEAVES,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=8,
    )
)
def test_any_nesting_of_plain_values_is_skipped(tmp_path: Path, extra: Any) -> None:
    path = tmp_path / "some.pt"
    torch.save({"extra": extra, "ids": torch.arange(7)}, path)
    assert torch.load(path, weights_only=True).keys() == {"extra", "ids"}
    with TorchZip(path) as archive:
        content = archive.content()
        assert archive.values(content["ids"]) == torch.arange(7).numpy().tobytes()
    assert isinstance(content["extra"], Opaque | list | dict | str | float | int | None)
