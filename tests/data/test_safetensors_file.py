"""Places of tensors in safetensors files, against the library and against damage."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.data.safetensors_file import SafetensorsFile
from eagle3.errors import DataError

Header = dict[str, Any]
ON_ONE_FILE = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """``ids`` [5] at the start, because its elements are larger, then ``states`` [5, 4, 3]."""
    path = tmp_path / "some.safetensors"
    states = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    save_file({"states": states, "ids": torch.arange(5)}, path, {"format": "pt"})
    return path


def rewrite_header(path: Path, change: Callable[[Header], object]) -> None:
    """Change the header, and keep the bytes after it."""
    content = path.read_bytes()
    (size,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])


def tensors(path: Path) -> dict[str, Tensor]:
    """Read what the header says, through the places."""
    with SafetensorsFile(path) as stored:
        return {
            name: torch.frombuffer(
                bytearray(stored.read(tensor.offset, tensor.num_bytes)),
                dtype=getattr(torch, tensor.dtype),
            ).reshape(tensor.shape)
            for name, tensor in stored.tensors.items()
            if tensor.num_bytes
        }


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int32,
        torch.int16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
    ],
    ids=str,
)  # fmt: skip
def test_places_are_those_of_the_library(dtype: torch.dtype, tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    content = {
        "a": torch.randint(0, 2, (3, 5)).to(dtype),
        "b": torch.arange(7),
        "scalar": torch.tensor(1).to(dtype),
    }
    save_file(content | {"empty": torch.zeros(0, 4)}, path)
    found = tensors(path)
    assert found.keys() == content.keys()
    for name, tensor in found.items():
        assert tensor.view(torch.uint8 if tensor.ndim else dtype).equal(
            load_file(path)[name].view(torch.uint8 if tensor.ndim else dtype)
        )


def test_ranges_past_the_first_read_are_read(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    content = {"a": torch.arange(40_000), "b": torch.arange(3)}
    save_file(content, path)
    assert tensors(path)["a"].equal(content["a"])


def move(name: str, by: int) -> Callable[[Header], object]:
    """Shift the bytes of a tensor."""

    def change(header: Header) -> None:
        header[name]["data_offsets"] = [x + by for x in header[name]["data_offsets"]]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(move("states", -8), "key 'states': .* overlap or leave a gap", id="overlap"),
        pytest.param(move("states", 8), "key 'states': .* overlap or leave a gap", id="gap"),
        pytest.param(
            lambda h: h["states"].update(shape=[10**6], data_offsets=[40, 40 + 2 * 10**6]),
            "cut off",
            id="out-of-range",
        ),
        pytest.param(
            lambda h: h["ids"].update(shape=[6]), "found 40 bytes, expected 48", id="shape"
        ),
        pytest.param(
            lambda h: h["ids"].update(data_offsets=[-8, 32]), "expected sizes", id="negative"
        ),
        pytest.param(lambda h: h["ids"].update(shape=[True]), "expected sizes", id="bool"),
        pytest.param(lambda h: h["ids"].pop("shape"), "found shape None", id="no-shape"),
        pytest.param(lambda h: h["ids"].update(dtype="I65"), "found dtype 'I65'", id="dtype"),
        pytest.param(lambda h: h.update(ids=7), "found dtype 7", id="not-a-tensor"),
        pytest.param(lambda h: h.pop("states"), "does not know what follows", id="unknown-bytes"),
    ],
)
def test_damaged_header_is_refused(
    change: Callable[[Header], object], message: str, path: Path
) -> None:
    rewrite_header(path, change)
    with pytest.raises(DataError, match=message) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (struct.pack("<Q", 2**62), "found a header of 4,611,686,018,427,387,904 bytes"),
        (struct.pack("<Q", 10**7), "cut off"),
        (struct.pack("<Q", 2) + b"[]", "a header that is a list"),
        (struct.pack("<Q", 4) + b"nope", "not valid JSON"),
        (struct.pack("<Q", 2) + b"\xff\xff", "not valid JSON"),
        (struct.pack("<Q", 13) + b'{"a":1,"a":2}', "'a' comes twice"),
        (struct.pack("<Q", 200_000) + b"[" * 200_000, "not valid JSON"),
        (b"abc", "found 3 bytes, expected 8"),
    ],
    ids=["huge", "past-the-end", "list", "text", "binary", "twice", "nested", "short"],
)
def test_nonsense_is_refused(head: bytes, message: str, path: Path) -> None:
    path.write_bytes(head)
    with pytest.raises(DataError, match=message):
        SafetensorsFile(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.safetensors: cannot be read"):
        SafetensorsFile(tmp_path / "none.safetensors")


@given(data=st.data())
@ON_ONE_FILE
def test_a_file_cut_anywhere_is_refused(data: st.DataObject, path: Path) -> None:
    whole = path.read_bytes()
    cut = path.with_name("cut.safetensors")
    cut.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(DataError, match=str(cut)):
        SafetensorsFile(cut)


@given(data=st.data())
@ON_ONE_FILE
def test_a_flipped_byte_of_the_header_is_refused_or_changes_no_place(
    data: st.DataObject, path: Path
) -> None:
    """A name can change without notice; the places of bytes cannot."""
    whole = path.read_bytes()
    header_bytes = len(whole) - 40 - 120
    with SafetensorsFile(path) as stored:
        expected = sorted((t.offset, t.num_bytes) for t in stored.tensors.values())
    spoiled = bytearray(whole)
    spoiled[data.draw(st.integers(0, header_bytes - 1))] ^= data.draw(st.integers(1, 255))
    flipped = path.with_name("flipped.safetensors")
    flipped.write_bytes(spoiled)
    try:
        with SafetensorsFile(flipped) as stored:
            found = sorted((t.offset, t.num_bytes) for t in stored.tensors.values())
    except DataError:
        return
    assert found == expected
