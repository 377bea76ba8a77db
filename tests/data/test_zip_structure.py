"""What other readers of a ``torch.save`` file rely on is compared, byte by byte."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle3.data.torch_zip import TorchZip
from eagle3.data.zip_structure import check_structure
from eagle3.errors import DataError

SAVED = {"ids": torch.arange(9), "states": [torch.ones(9, 2).bfloat16(), torch.zeros(9, 2)]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("zip") / "whole.pt"
    torch.save(SAVED, path)
    return path


def values(path: Path) -> Any:
    """What torch loads, or that it does not."""
    try:
        found = torch.load(path, weights_only=True)
        return [found["ids"].tolist(), *(state.tolist() for state in found["states"])]
    except Exception as error:  # torch fails in many ways
        return type(error)


def is_refused(path: Path) -> bool:
    try:
        with TorchZip(path) as archive:
            check_structure(archive)
            archive.content()
    except DataError:
        return True
    return False


def around_the_data(path: Path) -> list[int]:
    """Bytes that are in no record's data, and in no padding before it."""
    with TorchZip(path) as archive:
        skipped: set[int] = set()
        for entry in archive.entries.values():
            padding = entry.header + 30 + len(entry.name) + 4
            skipped |= set(range(padding, archive.start(entry) + entry.size))
    return [place for place in range(path.stat().st_size) if place not in skipped]


def test_whole_files_pass(whole: Path, tmp_path: Path) -> None:
    assert not is_refused(whole)
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(tmp_path / "python.pt", "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    assert not is_refused(tmp_path / "python.pt"), "no descriptors, no 64-bit end"


@settings(
    max_examples=400,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data(), bits=st.integers(1, 255))
def test_what_torch_would_not_load_is_refused(
    whole: Path, tmp_path: Path, data: st.DataObject, bits: int
) -> None:
    place = data.draw(st.sampled_from(around_the_data(whole)))
    content = bytearray(whole.read_bytes())
    content[place] ^= bits
    flipped = tmp_path / "flipped.pt"
    flipped.write_bytes(content)
    assert is_refused(flipped) or values(flipped) == values(whole)


LOCAL, CENTRAL = b"PK\x03\x04", b"PK\x01\x02"
END64, LOCATOR, END = b"PK\x06\x06", b"PK\x06\x07", b"PK\x05\x06"


@pytest.mark.parametrize(
    ("magic", "place", "expected"),
    [
        (LOCAL, 0, "the header of record"),
        (LOCAL, 26, "the header of record"),
        (LOCAL, 30, "the header of record"),
        (b"PK\x07\x08", 5, "what follows record"),
        (CENTRAL, 20, "contradicts itself about"),
        (CENTRAL, 34, "contradicts itself about"),
        (END64, 32, "the end of its directory"),
        (LOCATOR, 9, "the end of its directory"),
        (END, 4, "the end of its directory"),
        (END, 20, "the end of its directory"),
    ],
)
def test_where_it_is_wrong_is_said(
    whole: Path, tmp_path: Path, magic: bytes, place: int, expected: str
) -> None:
    content = bytearray(whole.read_bytes())
    content[content.rindex(magic) + place] ^= 0x01
    path = tmp_path / "flipped.pt"
    path.write_bytes(content)
    with TorchZip(path) as archive, pytest.raises(DataError, match=expected):
        check_structure(archive)
