"""Places of tensors in ``torch.save`` files: as torch finds them, or a message; never a guess."""

from __future__ import annotations

import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.serialization import set_crc32_options

from eagle3.data.torch_zip import StoredTensor, TorchZip
from eagle3.errors import DataError

QUICK = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int32]
DTYPES += [torch.int16, torch.int8, torch.uint8, torch.bool]


def content_of(path: Path) -> Any:
    with TorchZip(path) as archive:
        return archive.content()


def outcome(read: Callable[[Path], Any], path: Path) -> Any:
    """What ``read`` finds, or the error with which it refuses; others are not caught."""
    try:
        return read(path)
    except DataError as error:
        return error


def same_bytes(path: Path, found: StoredTensor, expected: Tensor) -> bool:
    """The file has, where ``found`` says, what torch loads."""
    assert found.is_contiguous
    with TorchZip(path) as archive:
        stored = archive.values(found)
    raw = expected.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return stored == raw and found.dtype == str(expected.dtype).removeprefix("torch.")


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    number = int(np.prod(shape))
    values = torch.arange(number, dtype=torch.float64).reshape(shape)
    return values.to(draw(st.sampled_from(DTYPES)))


@QUICK
@given(
    saved=st.dictionaries(
        st.text(max_size=8), st.one_of(tensors(), st.lists(tensors(), max_size=3)), max_size=4
    ),
    protocol=st.sampled_from([2, 4, 5]),
)
def test_tensors_lie_where_torch_finds_them(
    tmp_path: Path, saved: dict[str, Any], protocol: int
) -> None:
    path = tmp_path / "some.pt"
    torch.save(saved, path, pickle_protocol=protocol)
    found, loaded = content_of(path), torch.load(path, weights_only=False)
    assert found.keys() == loaded.keys()
    for key, value in loaded.items():
        ours, theirs = (v if isinstance(value, list) else [v] for v in (found[key], value))
        assert all(same_bytes(path, a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", ["data_0.pt", "ä b.c.pt", "x" * 200 + ".pt", "noending"])
def test_name_of_the_file_does_not_matter(tmp_path: Path, name: str) -> None:
    saved = torch.arange(100)
    torch.save({"a": saved}, tmp_path / name)
    (tmp_path / name).rename(tmp_path / "renamed")
    assert same_bytes(tmp_path / "renamed", content_of(tmp_path / "renamed")["a"], saved)


def test_views_have_the_place_of_their_storage(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    saved = {"rows": whole[1:3], "column": whole[:, 1], "turned": whole.T, "one": whole[2:3, 1:]}
    path = tmp_path / "views.pt"
    torch.save(saved, path)
    found = content_of(path)
    assert same_bytes(path, found["rows"], whole[1:3])
    assert same_bytes(path, found["one"], whole[2:3, 1:])
    assert found["rows"].record == found["column"].record
    assert not found["column"].is_contiguous
    assert not found["turned"].is_contiguous


def test_many_files_of_one_kind_do_not_mix(tmp_path: Path) -> None:
    """Later files are read with the help of earlier ones; lengths of every integer width."""
    for tokens in (1, 3, 255, 256, 4, 70_000, 257, 3):
        saved = {"ids": torch.arange(tokens), "states": [torch.ones(tokens, 2), torch.ones(2, 3)]}
        torch.save(saved, tmp_path / "a.pt")
        found = content_of(tmp_path / "a.pt")
        assert same_bytes(tmp_path / "a.pt", found["ids"], saved["ids"])
        assert [s.shape for s in found["states"]] == [(tokens, 2), (2, 3)]


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A small file with ids and states."""
    path = tmp_path / "whole.pt"
    torch.save({"ids": torch.arange(40), "states": [torch.randn(40, 4) for _ in range(2)]}, path)
    return path


@QUICK
@given(where=st.floats(0, 1, exclude_max=True))
def test_a_cut_file_is_refused_wherever_it_was_cut(whole: Path, where: float) -> None:
    content = whole.read_bytes()
    cut = whole.with_name("cut.pt")
    cut.write_bytes(content[: int(where * len(content))])
    with pytest.raises(DataError, match=r"cut\.pt: found"):
        content_of(cut)


def everything(path: Path) -> list[tuple[tuple[int, ...], int, bytes]]:
    """Shape, place and bytes of each tensor."""
    with TorchZip(path) as archive:
        content = archive.content()
        found = [content["ids"], *content["states"]]
        return [(tensor.shape, tensor.offset, archive.values(tensor)) for tensor in found]


@settings(QUICK, max_examples=250)
@given(where=st.floats(0, 1, exclude_max=True), bits=st.integers(1, 255))
def test_a_flipped_byte_is_refused_or_changes_nothing(whole: Path, where: float, bits: int) -> None:
    content = bytearray(whole.read_bytes())
    content[int(where * len(content))] ^= bits
    flipped = whole.with_name("flipped.pt")
    flipped.write_bytes(content)
    found = outcome(everything, flipped)
    assert isinstance(found, DataError) or found == everything(whole)


@contextmanager
def without_checksums() -> Iterator[None]:
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(True)


def test_files_saved_without_checksums_are_read(tmp_path: Path) -> None:
    saved = torch.arange(30)
    with without_checksums():
        torch.save({"a": saved}, tmp_path / "a.pt")
    found = content_of(tmp_path / "a.pt")["a"]
    assert found.record.crc32 == 0
    assert same_bytes(tmp_path / "a.pt", found, saved)


def repacked(source: Path, target: Path, change: Callable[[str, bytes], bytes], **how: Any) -> Path:
    """The records of an archive, changed, in a zip of Python's making."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", **how) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return target


def unchanged(name: str, content: bytes) -> bytes:
    return content


def test_archive_without_padding_is_read(whole: Path) -> None:
    other = repacked(whole, whole.with_name("other.pt"), unchanged)
    with TorchZip(whole) as archive, TorchZip(other) as again:
        ours, theirs = archive.content()["states"], again.content()["states"]
        assert [archive.values(t) for t in ours] == [again.values(t) for t in theirs]
        assert ours[0].offset != theirs[0].offset


def test_compressed_archive_is_refused(whole: Path) -> None:
    other = repacked(
        whole, whole.with_name("other.pt"), unchanged, compression=zipfile.ZIP_DEFLATED
    )
    with pytest.raises(DataError, match=r"compressed or encrypted record whole/data\.pkl.*again"):
        content_of(other)


def test_big_endian_file_is_refused(whole: Path) -> None:
    def swap(name: str, content: bytes) -> bytes:
        return b"big" if name.endswith("/byteorder") else content

    other = repacked(whole, whole.with_name("other.pt"), swap)
    with pytest.raises(DataError, match="big-endian numbers, expected little-endian"):
        content_of(other)


def test_old_format_says_how_to_convert_it(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(DataError, match=r"old\.pt: found .* not a torch\.save zip.*torch\.load"):
        content_of(tmp_path / "old.pt")


def zip64(records: dict[str, bytes], *, far: bool) -> bytes:
    """An archive whose directory has 64-bit sizes and places, as those above 4 GiB have.

    With ``far`` the record fields are 64-bit, too; else only the end of the directory is.
    """
    body, directory = b"", b""
    for name, content in records.items():
        place, crc, key = len(body), zlib.crc32(content), name.encode()
        extra = struct.pack("<HHQQQ", 1, 24, len(content), len(content), place) if far else b""
        extra = struct.pack("<HHH", 0x4642, 2, 0) + extra  # another extra field comes first
        size, at = (0xFFFFFFFF, 0xFFFFFFFF) if far else (len(content), place)
        local = struct.pack(
            "<4s5H3I2H", b"PK\x03\x04", 45, 0, 0, 0, 0, crc, size, size, len(key), 0
        )
        body += local + key + content
        entry = (b"PK\x01\x02", 45, 45, 0, 0, 0, 0, crc, size, size, len(key), len(extra))
        directory += struct.pack("<4s6H3I5H2I", *entry, 0, 0, 0, 0, at) + key + extra
    start, end = len(body), len(body) + len(directory)
    count = len(records)
    end64 = (b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(directory), start)
    tail = struct.pack("<4sQ2H2I4Q", *end64) + struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1)
    full = (b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return body + directory + tail + struct.pack("<4s4H2IH", *full)


@pytest.mark.parametrize("far", [True, False], ids=["64-bit records", "64-bit directory"])
def test_zip64_archive_is_read(whole: Path, far: bool) -> None:
    with zipfile.ZipFile(whole) as old:
        records = {name: old.read(name) for name in old.namelist()}
    large = whole.with_name("large.pt")
    large.write_bytes(zip64(records, far=far))
    loaded = torch.load(whole, weights_only=True)
    found = content_of(large)
    assert same_bytes(large, found["ids"], loaded["ids"])
    assert all(
        same_bytes(large, a, b) for a, b in zip(found["states"], loaded["states"], strict=True)
    )
    content = large.read_bytes()
    cut = content.rindex(b"PK\x06\x07")
    large.write_bytes(content[:cut] + b"\0\0\0\0" + content[cut + 4 :])
    with pytest.raises(DataError, match="its directory has no place"):
        content_of(large)


def with_pickle(whole: Path, program: bytes) -> Path:
    def swap(name: str, content: bytes) -> bytes:
        return program if name.endswith("/data.pkl") else content

    return repacked(whole, whole.with_name("hostile.pt"), swap)


def nested(opening: bytes, depth: int, closing: bytes = b"") -> bytes:
    return b"\x80\x02" + opening * depth + closing * depth + b"."


TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"
STORAGE = (
    b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x05tQ"
)
SELF = b"\x80\x02]q\x00h\x00a."
HOSTILE = [
    pytest.param(b"cos\nsystem\n(X\x04\x00\x00\x00truetR.", "os.system", id="calls a command"),
    pytest.param(b"cbuiltins\neval\n.", "builtins.eval", id="names a function"),
    pytest.param(pickle.dumps(Path("a")), "pathlib", id="an object"),
    pytest.param(b"}(K\x01K\x02K\x03u.", "makes no sense", id="a dict of three values"),
    pytest.param(b"\x80\x02}()]u.", "keys are neither", id="a tuple as a key"),
    pytest.param(b"(K\x01lp0\n.", "instruction", id="instructions of protocol 0"),
    pytest.param(b"\x80\x02]}b.", "attributes of a value", id="sets attributes"),
    pytest.param(b"\x80\x02]](K\x01\x90.", "without a set", id="adds to what is no set"),
    pytest.param(b"ctorch\nbfloat16\n)R.", "a call of a value", id="calls a dtype"),
    pytest.param(b"ctorch.hub\nload\n.", "torch.hub.load", id="another function of torch"),
    pytest.param(b"ctorch\nload\n.", "torch.load", id="a function beside the dtypes"),
    pytest.param(
        b"ctorch._utils\n_rebuild_tensor_v3\n(K\x01K\x00))\x89}K\x01tR.",
        "without a storage",
        id="no storage and no dtype",
    ),
    pytest.param(b"\x80\x02Nr\xff\xff\xff\xff0.", "instruction", id="pops"),
    pytest.param(b"\x80\x02" + b"N" * (1 << 20) + b".", "a pickle of 1,048", id="huge"),
    pytest.param(b"\x80\x02X\xff\xff\xff\x7fabc.", "ends early", id="text longer than the file"),
    pytest.param(b"\x80\x02" + b"h\x07" * 3 + b".", "makes no sense", id="what was never stored"),
    pytest.param(b"\x80\x02}", "makes no sense", id="no end"),
    pytest.param(b".", "makes no sense", id="nothing"),
    pytest.param(b"tt.", "makes no sense", id="no mark"),
    pytest.param(TENSOR + b"(K\x01K\x00)))tR.", "without a storage", id="no storage"),
    pytest.param(TENSOR + b"(" + STORAGE + b"K\x00]]tR.", "without a shape", id="no shape"),
    pytest.param(
        TENSOR + b"(" + STORAGE + b"J\xff\xff\xff\xffK\x05\x85K\x01\x85tR.",
        "without a shape",
        id="a negative offset",
    ),
    pytest.param(
        TENSOR + b"(" + STORAGE + b"K\x00\x8a\x08" + b"\xff" * 7 + b"\x7f\x85K\x01\x85tR.",
        "ends after its storage",
        id="larger than its storage",
    ),
    pytest.param(
        TENSOR + b"(" + STORAGE.replace(b"\x000X", b"\x009X") + b"K\x00K\x05\x85K\x01\x85tR.",
        "no storage 9",
        id="a storage that is not there",
    ),
]


@pytest.mark.parametrize(("program", "expected"), HOSTILE)
def test_hostile_pickle_is_refused(whole: Path, program: bytes, expected: str) -> None:
    with pytest.raises(DataError, match=r"hostile\.pt: found") as caught:
        content_of(with_pickle(whole, program))
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(nested(b"]", 1000), id="many lists"),
        pytest.param(nested(b")\x85", 1), id="a tuple in a tuple"),
        pytest.param(b"\x80\x02)" + b"\x85" * 300_000 + b".", id="tuples 300,000 deep"),
        pytest.param(b"\x80\x02" + b"]" * 300_000 + b"a" * 299_999 + b".", id="lists so deep"),
        pytest.param(SELF, id="a list within itself"),
        pytest.param(
            b"\x80\x02}X\x01\x00\x00\x00aNr\xff\xff\xff\xfes.", id="a far place stored to"
        ),
    ],
)
def test_strange_pickle_costs_no_more_than_its_size(whole: Path, program: bytes) -> None:
    """No crash, no endless loop, no memory; what is not a dict of tensors is refused later."""
    found = outcome(content_of, with_pickle(whole, program))
    assert isinstance(found, list | tuple | dict | DataError)


@QUICK
@given(program=st.binary(max_size=60))
def test_random_pickle_is_refused_or_plain(whole: Path, program: bytes) -> None:
    outcome(content_of, with_pickle(whole, b"\x80\x02" + program + b"."))


def test_lengths_of_a_pickle_that_is_known_are_checked_as_always(whole: Path) -> None:
    """A file that differs from an earlier one in numbers only gets no easier treatment."""

    def grow(name: str, content: bytes) -> bytes:
        return content.replace(b"K\x28", b"K\x29") if name.endswith("/data.pkl") else content

    content_of(whole)
    with pytest.raises(DataError, match="ends after its storage"):
        content_of(repacked(whole, whole.with_name("longer.pt"), grow))
