"""Exactly the wanted states, each byte once, and nothing that was damaged on the way."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle3.data import reading
from eagle3.data.byte_reader import BufferedReader, ByteReader, DirectReader, PageCache
from eagle3.data.formats import open_store
from eagle3.data.index import index_records
from eagle3.data.layout import Plane
from eagle3.data.reading import StateReader, Target, all_finite
from eagle3.errors import DataError
from eagle3.names import ReadMode
from tests.data.conftest import LAYOUT as V1_LAYOUT
from tests.data.disks import Disk, Log
from tests.data.raw_store import LAYOUT, PLANES, write_raw

Make = Callable[..., dict[str, Any]]
Write = Callable[..., Path]
READERS: dict[str, Callable[[], ByteReader]] = {
    "buffered": BufferedReader,
    "buffered, dropped": lambda: BufferedReader(PageCache.drop),
    "direct": DirectReader,
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
BAD = [float("nan"), -float("nan"), float("inf"), -float("inf")]


def values(tokens: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, LAYOUT.width, generator=generator).to(dtype)


def whole(reader: StateReader, document: int) -> Tensor:
    """All states of a document."""
    sample = reader.sample(document)
    return torch.cat((sample.aux_hidden, sample.last_hidden), dim=1)


@pytest.fixture(params=READERS)
def byte_reader(request: pytest.FixtureRequest) -> ByteReader:
    return READERS[request.param]()


def open_v1(directory: Path, byte_reader: ByteReader | None = None) -> StateReader:
    store = open_store(directory, V1_LAYOUT)
    index = index_records([record for file in store.files for record in store.probe(file)])
    return StateReader(store, index, byte_reader)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("planes", PLANES.values(), ids=PLANES)
@pytest.mark.parametrize("start", [0, 1, 4093])
def test_documents_come_back_bit_by_bit(
    tmp_path: Path,
    byte_reader: ByteReader,
    planes: tuple[Plane, ...],
    dtype: torch.dtype,
    start: int,
) -> None:
    """Also when nothing in the file lies where numbers like to lie."""
    documents = [values(tokens, tokens, dtype) for tokens in (1, 7, 700)]
    reader = StateReader(*write_raw(tmp_path, documents, planes, start), byte_reader)
    for document, expected in enumerate(documents):
        assert torch.equal(whole(reader, document), expected)
        sample = reader.sample(document, len(expected) // 2)
        assert torch.equal(sample.last_hidden, expected[len(expected) // 2 :, 12:])
        assert sample.input_ids.tolist() == list(range(len(expected)))


@st.composite
def some_targets(draw: st.DrawFn) -> list[tuple[Plane, int, int]]:
    """Columns and tokens, as a loader or anybody else may want them."""
    tokens = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted)
    borders = st.sets(st.sampled_from(range(17)), min_size=2, max_size=2).map(sorted)
    columns = st.one_of(
        st.sampled_from([LAYOUT.aux, LAYOUT.last]), borders.map(lambda b: Plane(*b))
    )
    return [(c, *t) for c, t in draw(st.lists(st.tuples(columns, tokens), max_size=6))]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    wanted=some_targets(),
    planes=st.sampled_from(list(PLANES.values())),
    name=st.sampled_from(list(READERS)),
    piece_bytes=st.sampled_from([1, 100, 500, 4 << 20]),
    gap_bytes=st.sampled_from([0, 100, 128 << 10]),
)
def test_targets_get_what_they_ask_for(
    tmp_path: Path,
    wanted: list[tuple[Plane, int, int]],
    planes: tuple[Plane, ...],
    name: str,
    piece_bytes: int,
    gap_bytes: int,
) -> None:
    """Every target is filled, nothing beside it is touched, and no byte is read twice."""
    log, expected = Log(), values(60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "PIECE_BYTES", piece_bytes)
        patch.setattr(reading, "_GAP_BYTES", gap_bytes)
        reader = StateReader(*write_raw(tmp_path, [expected], planes), Disk(log, READERS[name]()))
        frames, targets = [], []
        for columns, start, stop in wanted:
            frames.append(torch.full((stop - start + 2, columns.width + 3), 9.0).bfloat16())
            targets.append(Target(columns, start, frames[-1][1:-1, 2:-1]))
        read_bytes = reader.read(0, targets)
    for frame, target in zip(frames, targets, strict=True):
        columns = target.columns
        assert torch.equal(
            frame[1:-1, 2:-1], expected[target.start : target.stop, columns.first : columns.stop]
        )
        frame[1:-1, 2:-1] = 9
        assert bool((frame == 9).all())
    ranges = sorted((offset, offset + count) for _, offset, count in log.reads)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(ranges))
    assert read_bytes == sum(stop - start for start, stop in ranges)
    if not gap_bytes:
        needed = sum(plane.width * 2 * len(_tokens_of(plane, wanted)) for plane in planes)
        assert read_bytes == needed


def _tokens_of(plane: Plane, wanted: list[tuple[Plane, int, int]]) -> set[int]:
    return {
        token
        for columns, start, stop in wanted
        if plane.overlap(columns)
        for token in range(start, stop)
    }


@pytest.mark.parametrize(("gap", "reads"), [(1, 1), (4, 1), (5, 2)])
def test_short_gaps_are_read_but_go_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gap: int, reads: int
) -> None:
    """A gap of up to four tokens of 8 bytes is cheaper to read than to step over."""
    monkeypatch.setattr(reading, "_GAP_BYTES", 32)
    expected, log = values(20), Log()
    expected[7 : 7 + gap, 12:] = float("nan")
    store, index = write_raw(tmp_path, [expected], PLANES["aux and last"])
    reader = StateReader(store, index, Disk(log))
    out = torch.zeros(20, 4, dtype=torch.bfloat16)
    reader.read(
        0, [Target(LAYOUT.last, 3, out[3:7]), Target(LAYOUT.last, 7 + gap, out[7 + gap : 15])]
    )
    assert len(log.reads) == reads
    expected[7 : 7 + gap] = 0
    assert torch.equal(out[3:15], expected[3:15, 12:])


def test_long_ranges_come_in_pieces_for_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PIECE_BYTES", 24 * 10)
    reader = StateReader(*write_raw(tmp_path, [values(25)], PLANES["aux and last"]))
    out = torch.empty(25, 12, dtype=torch.bfloat16)
    pieces = reader.pieces(0, [Target(LAYOUT.aux, 0, out)])
    assert [(piece.start, piece.stop) for piece in pieces] == [(0, 8), (8, 16), (16, 25)]
    for piece in reversed(pieces):
        assert piece.read() == piece.nbytes
    assert torch.equal(out, values(25)[:, :12])


@settings(max_examples=200)
@given(
    bits=st.lists(st.integers(0, 2**64 - 1), max_size=20),
    dtype=st.sampled_from(DTYPES),
)
def test_finite_is_finite_for_every_pattern_of_bits(bits: list[int], dtype: torch.dtype) -> None:
    size = dtype.itemsize
    found = np.array(bits, np.uint64).astype(f"u{size}").view(f"i{size}")
    expected = bool(torch.isfinite(torch.from_numpy(found).view(dtype)).all())
    assert all_finite(found, reading._EXPONENTS[dtype]) is expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_finite_is_finite_for_every_single_number(dtype: torch.dtype) -> None:
    bits = np.arange(-(2**15), 2**15, dtype=np.int16)
    expected = torch.isfinite(torch.from_numpy(bits).view(dtype)).tolist()
    exponent = reading._EXPONENTS[dtype]
    assert [all_finite(bits[k : k + 1], exponent) for k in range(len(bits))] == expected


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("planes", PLANES.values(), ids=PLANES)
def test_a_state_that_is_not_finite(
    tmp_path: Path, planes: tuple[Plane, ...], dtype: torch.dtype, bad: float
) -> None:
    """An error where it is wanted, and none where it is not: another row, or other columns."""
    content = values(30, dtype=dtype)
    content[17, 13] = bad
    reader = StateReader(*write_raw(tmp_path, [content], planes))

    def read(columns: Plane, start: int, stop: int) -> None:
        out = torch.empty(stop - start, columns.width, dtype=dtype)
        reader.read(0, [Target(columns, start, out)])

    with pytest.raises(DataError, match=r"NaN or inf in 1 of the tokens 10..29, .* token 17;"):
        read(LAYOUT.last, 10, 30)
    read(LAYOUT.last, 0, 17)
    read(LAYOUT.last, 18, 30)
    read(LAYOUT.aux, 0, 30)


def test_a_modified_copy_of_one_file_is_found_by_its_ids(
    tmp_path: Path, document: Make, write: Write, byte_reader: ByteReader
) -> None:
    """One byte of the token ids flips on the disk."""
    shards = write(tmp_path / "s", [document(9, 1), document(9, 2)])
    reader = open_v1(shards, byte_reader)
    path = shards / "data_1.pt"
    content = bytearray(path.read_bytes())
    content[int(reader.index.ids_offset[1]) + 8] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"{path}: found other token ids than when"):
        reader.input_ids(1)
    assert len(reader.sample(0)) == 9


def test_a_flipped_byte_that_makes_a_nan(
    tmp_path: Path, document: Make, write: Write, byte_reader: ByteReader
) -> None:
    content = document(9, 1)
    content["hidden_states"][2][5, 1] = 1.0  # 0x3F80: two bits away from inf
    shards = write(tmp_path / "s", [content])
    reader, path = open_v1(shards, byte_reader), shards / "data_0.pt"
    at = int(reader.index.state_offsets[0, 2]) + (5 * V1_LAYOUT.hidden_size + 1) * 2 + 1
    raw = bytearray(path.read_bytes())
    raw[at] = 0x7F
    path.write_bytes(raw)
    with pytest.raises(DataError, match=rf"{path}: .* the first is token 5;"):
        reader.sample(0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("other ids", "found other token ids"),
        ("same ids, other size", "was cut or replaced since"),
        ("truncated", "was cut or replaced since"),
        ("deleted", "cannot be read"),
    ],
)
def test_a_file_that_changed_after_it_was_indexed(
    tmp_path: Path,
    document: Make,
    write: Write,
    truncate: Callable[[Path], None],
    byte_reader: ByteReader,
    change: str,
    message: str,
) -> None:
    shards = write(tmp_path / "s", [document(9, 1)])
    reader, path = open_v1(shards, byte_reader), shards / "data_0.pt"
    if change == "other ids":
        torch.save(document(9, 2), path)
    elif change == "truncated":
        truncate(path)
    elif change == "deleted":
        path.unlink()
    else:
        same = document(9, 1)
        torch.save(same | {"hidden_states": [s.double() for s in same["hidden_states"]]}, path)
    with pytest.raises(DataError, match=rf"{path}: .*{message}"):
        reader.sample(0)


@pytest.mark.parametrize("mode", list(ReadMode))
def test_a_reader_by_name(tmp_path: Path, document: Make, write: Write, mode: ReadMode) -> None:
    shards = write(tmp_path / "s", [document(9, 1)])
    store = open_store(shards, V1_LAYOUT)
    reader = StateReader.open(store, index_records(store.probe("data_0.pt")), mode, 2)
    expected = torch.load(shards / "data_0.pt", weights_only=True)["hidden_states"]
    assert torch.equal(whole(reader, 0), torch.cat(expected, dim=1))
