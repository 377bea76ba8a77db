"""An index that is kept: taken while the files stay as they are, and never wrong."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle3.data.bad_samples import BadSamples
from eagle3.data.declaration import StoredDeclaration
from eagle3.data.formats import open_store
from eagle3.data.index import DocumentIndex, build_index
from eagle3.data.layout import Plane, StateLayout
from eagle3.data.masks import Runs, supervised_runs
from eagle3.data.store import DocumentRecord
from eagle3.errors import DataError

Make = Callable[..., dict[str, Any]]
Write = Callable[..., Path]
Build = Callable[..., DocumentIndex]
QUICK = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def index_of(tmp_path: Path, layout: StateLayout) -> Build:
    def build(directory: Path, bad: BadSamples | None = None, **changes: Any) -> DocumentIndex:
        arguments: dict[str, Any] = {"cache": tmp_path / "cache", "num_workers": 3}
        arguments |= {"bad_samples": BadSamples(2) if bad is None else bad} | changes
        return build_index(open_store(directory, layout), **arguments)

    return build


@pytest.fixture
def stored(tmp_path: Path) -> Callable[[], list[Path]]:
    """Every file in the cache."""
    return lambda: sorted(p for p in (tmp_path / "cache").rglob("*") if p.is_file())


def same(a: DocumentIndex, b: DocumentIndex) -> bool:
    """Every field, bit by bit."""
    for field in fields(DocumentIndex):
        ours, theirs = getattr(a, field.name), getattr(b, field.name)
        pairs = [(ours, theirs)]
        if isinstance(ours, Runs):
            pairs = [(ours.offsets, theirs.offsets), (ours.bounds, theirs.bounds)]
        for x, y in pairs:
            if isinstance(x, np.ndarray):
                if x.dtype != y.dtype or x.shape != y.shape or x.tobytes() != y.tobytes():
                    return False
            elif x != y:
                return False
    return True


def test_stored_index_is_taken_while_the_files_stay(
    tmp_path: Path,
    document: Make,
    write: Write,
    index_of: Build,
    stored: Callable[[], list[Path]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    shards = write(tmp_path / "s", [document(6, 0), document(1, 1), document(7, 2)])
    (shards / "data_2.pt").write_bytes(b"bad")
    with caplog.at_level(logging.INFO, "eagle3"):
        first = index_of(shards)
        assert [r.getMessage().partition(" in ")[0] for r in caplog.records] == [
            f"indexed {shards}: 3 files, 6 tokens"
        ]
        before, bad = stored(), BadSamples(2)
        assert same(index_of(shards, bad), first)
        assert len(caplog.records) == 1, "nothing is said of an index that was there"
    assert bad.lines == [reason for _, reason in first.bad]
    assert stored() == before
    assert sorted(p.name for p in shards.iterdir()) == ["data_0.pt", "data_1.pt", "data_2.pt"]
    torch.save(document(8, 3), shards / "data_3.pt")
    assert index_of(shards).files == ("data_0.pt", "data_3.pt")
    (shards / "data_0.pt").unlink()
    assert index_of(shards).files == ("data_3.pt",)


def test_replaced_file_makes_a_new_index(
    tmp_path: Path, document: Make, write: Write, index_of: Build
) -> None:
    shards = write(tmp_path / "s", [document(6, 0)])
    first = index_of(shards)
    write(shards, [document(6, 1)])
    os.utime(shards / "data_0.pt", (1, 1))
    assert index_of(shards).fingerprint != first.fingerprint
    write(shards, [document(60, 1)])
    os.utime(shards / "data_0.pt", (1, 1))
    assert index_of(shards).lengths.tolist() == [60]


def test_other_sizes_make_a_new_index(
    tmp_path: Path, document: Make, write: Write, index_of: Build, layout: StateLayout
) -> None:
    shards = write(tmp_path / "s", [document(6, 0)])
    index_of(shards)
    smaller = StateLayout(layout.num_aux_layers, layout.hidden_size, 3)
    with pytest.raises(DataError, match=r"model\.vocab_size=3"):
        build_index(open_store(shards, smaller), tmp_path / "cache", BadSamples(0), 1)


def test_index_moves_with_the_data(
    tmp_path: Path,
    document: Make,
    write: Write,
    index_of: Build,
    stored: Callable[[], list[Path]],
) -> None:
    shards = write(tmp_path / "s", [document(6, 0), document(7, 1)])
    (shards / "data_1.pt").write_bytes(b"bad")
    first, files = index_of(shards), stored()
    moved = shards.rename(tmp_path / "elsewhere")
    bad = BadSamples(1)
    index = index_of(moved, bad)
    assert (index.fingerprint, stored()) == (first.fingerprint, files)
    assert bad.lines[0].startswith(f"{moved}/data_1.pt"), "messages name the new place"


def test_file_that_can_be_read_again_comes_back(
    tmp_path: Path, document: Make, write: Write, index_of: Build
) -> None:
    """A disk that failed for a moment leaves size and time of a file as they were."""
    shards = write(tmp_path / "s", [document(6, 0), document(7, 1)])
    whole, times = (shards / "data_1.pt").read_bytes(), (7, 7)
    (shards / "data_1.pt").write_bytes(bytes(len(whole)))
    os.utime(shards / "data_1.pt", times)
    assert index_of(shards).files == ("data_0.pt",)
    (shards / "data_1.pt").write_bytes(whole)
    os.utime(shards / "data_1.pt", times)
    assert index_of(shards).files == ("data_0.pt", "data_1.pt")
    assert index_of(shards).bad == ()


@QUICK
@given(where=st.floats(0, 1, exclude_max=True), bits=st.integers(0, 255))
def test_damaged_stored_index_is_made_again(
    shards: Path, index_of: Build, stored: Callable[[], list[Path]], where: float, bits: int
) -> None:
    """A flipped byte; or the file cut there, for ``bits`` 0."""
    first = index_of(shards)
    (path,) = stored()
    whole = path.read_bytes()
    at = int(where * len(whole))
    path.write_bytes(whole[:at] + (bytes([whole[at] ^ bits]) + whole[at + 1 :] if bits else b""))
    assert same(index_of(shards), first)
    assert path.read_bytes() == whole


def test_cache_inside_the_data_is_refused(
    tmp_path: Path, document: Make, write: Write, index_of: Build
) -> None:
    shards = write(tmp_path / "s", [document(6)])
    with pytest.raises(DataError, match=r"paths\.cache"):
        index_of(shards, cache=shards / "cache")
    assert [p.name for p in shards.iterdir()] == ["data_0.pt"]


def test_cache_that_cannot_be_written_is_named(
    tmp_path: Path, document: Make, write: Write, index_of: Build
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"paths\.cache: cannot write"):
        index_of(write(tmp_path / "s", [document(6)]), cache=tmp_path / "file")


def test_data_that_may_not_be_written_is_indexed(
    tmp_path: Path, document: Make, write: Write, index_of: Build
) -> None:
    shards = write(tmp_path / "s", [document(6)])
    times = shards.stat().st_mtime_ns
    shards.chmod(0o555)
    try:
        assert len(index_of(shards)) == 1
    finally:
        shards.chmod(0o755)
    assert shards.stat().st_mtime_ns == times


def test_many_that_index_at_once_agree(
    shards: Path, index_of: Build, stored: Callable[[], list[Path]]
) -> None:
    """As ranks and the jobs of a sweep do, each with a partial file of its own."""
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda _: index_of(shards, num_workers=1), range(12)))
    assert all(same(index, found[0]) for index in found)
    assert len(stored()) == 1
    assert same(index_of(shards), found[0])


class RecordStore:
    """A store that has its records in memory, as any format might find them."""

    side_files: tuple[Path, ...] = ()

    def __init__(self, directory: Path, records: Sequence[DocumentRecord]) -> None:
        self.directory = directory
        self.layout = StateLayout(1, 2, 50)
        self.planes = (Plane(0, 4),)
        self.records = records
        self.files = tuple(dict.fromkeys(record.file for record in records))

    def declaration(self) -> StoredDeclaration:
        return StoredDeclaration()

    def probe(self, file: str) -> Sequence[DocumentRecord]:
        return [record for record in self.records if record.file == file]


@st.composite
def records(draw: st.DrawFn) -> list[DocumentRecord]:
    found = []
    dtype = draw(st.sampled_from(["bfloat16", "float32"]))
    planes = draw(st.integers(1, 4))
    large = st.integers(0, 2**63 - 1)
    for name in draw(st.lists(st.integers(0, 9), min_size=1, max_size=12)):
        mask = np.array(draw(st.lists(st.booleans(), min_size=2, max_size=20)), np.bool_)
        found.append(
            DocumentRecord(
                file=f"datei-ü{name}.bin",
                length=len(mask),
                runs=supervised_runs(mask),
                sample_hash=draw(st.integers(0, 2**64 - 1)),
                prompt_hash=draw(st.integers(0, 2**64 - 1)),
                dtype=dtype,
                ids_offset=draw(large),
                ids_bytes=draw(st.sampled_from([4, 8])),
                state_offsets=tuple(draw(large) for _ in range(planes)),
                source=draw(st.sampled_from(["", "chat", "code"])),
            )
        )
    return found


@QUICK
@given(found=records())
def test_any_index_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, found: list[DocumentRecord]
) -> None:
    place = tmp_path_factory.mktemp("index")
    first = build_index(RecordStore(place / "data", found), place / "cache", BadSamples(0), 1)
    empty = RecordStore(place / "data", [])
    empty.files = tuple(dict.fromkeys(record.file for record in found))
    assert same(build_index(empty, place / "cache", BadSamples(0), 1), first), "nothing was probed"
    shutil.rmtree(place)
