"""Ranges of bytes through the page cache and past it, and disks that do not do as asked."""

import errno
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.data.buffers import huge_pages
from eagle3.data.byte_reader import (
    BufferedReader,
    ByteReader,
    DirectReader,
    IndexedFile,
    PageCache,
)
from eagle3.data.read_mode import available_memory, choose_reader
from eagle3.errors import DataError
from eagle3.names import ReadMode

SIZE = 3 * 4096 + 1234
CONTENT = np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)
READERS: dict[str, Callable[[], ByteReader]] = {
    "buffered": BufferedReader,
    "buffered, dropped": lambda: BufferedReader(PageCache.drop),
    "direct": DirectReader,
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> IndexedFile:
    path = tmp_path_factory.mktemp("bytes") / "file"
    path.write_bytes(CONTENT.tobytes())
    return IndexedFile.at(path)


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest) -> ByteReader:
    return READERS[request.param]()


def both_ways(reader: ByteReader, file: IndexedFile, offset: int, count: int) -> None:
    """Read and compare."""
    expected = CONTENT[offset : offset + count]
    assert np.array_equal(reader.read(file, offset, count), expected)
    out = np.full(count + 2, 7, np.uint8)
    reader.read_into(file, offset, out[1:-1])
    assert np.array_equal(out, np.concatenate(([7], expected, [7])))


@settings(max_examples=30)
@given(offset=st.integers(0, SIZE), data=st.data(), name=st.sampled_from(list(READERS)))
def test_any_range(file: IndexedFile, offset: int, data: st.DataObject, name: str) -> None:
    both_ways(READERS[name](), file, offset, data.draw(st.integers(0, SIZE - offset)))


@pytest.mark.parametrize(("offset", "count"), [(0, 4096), (512, 1024), (4096, 512)])
def test_whole_blocks_are_read_straight_into_the_target(
    file: IndexedFile, monkeypatch: pytest.MonkeyPatch, offset: int, count: int
) -> None:
    filled, whole, out = [], os.preadv, huge_pages(8192)[512 : 512 + count]

    def note(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        filled.append(np.frombuffer(buffers[0], np.uint8).ctypes.data)
        return whole(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", note)
    DirectReader().read_into(file, offset, out)
    assert np.array_equal(out, CONTENT[offset : offset + count])
    assert filled == [out.ctypes.data]


@pytest.mark.parametrize("refusal", [errno.EINVAL, errno.EFAULT], ids=["blocks", "memory"])
def test_a_disk_that_does_not_reach_the_target_gets_a_buffer(
    file: IndexedFile, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    """It has larger blocks, or the memory is not of the usual kind."""
    whole, out, tries = os.preadv, huge_pages(8192)[512 : 512 + 1024], []

    def refuse(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if np.frombuffer(buffers[0], np.uint8).ctypes.data == out.ctypes.data:
            tries.append(offset)
            raise OSError(refusal, os.strerror(refusal))
        return whole(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuse)
    reader = DirectReader()
    for offset in (512, 1024):
        reader.read_into(file, offset, out)
        assert np.array_equal(out, CONTENT[offset : offset + 1024])
    assert tries == [512], "not tried again"
    assert not reader.refused


@pytest.mark.parametrize("count", [1, 1000, 4096, 5000])
def test_reads_that_are_cut_short_go_on(
    file: IndexedFile, reader: ByteReader, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """A direct read gives whole pages or ends the file, so a short one is read again in part."""
    whole = os.preadv

    def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        pages = -(-count // 4096) * 4096 if len(buffers[0]) % 4096 == 0 else count
        least = min(len(buffers[0]), max(pages, 1))
        return min(whole(descriptor, [buffers[0][:least]], offset), least)

    monkeypatch.setattr(os, "preadv", short)
    both_ways(reader, file, 70, 9000)
    both_ways(reader, file, 4097, SIZE - 4097)


def test_interrupted_calls_go_on(file: IndexedFile, reader: ByteReader) -> None:
    """Signals rain on the process while two other threads read beside this one."""
    caught: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: caught.append(number))
    signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
    wrong: list[Exception] = []

    def work() -> None:
        try:
            for _ in range(200):
                both_ways(reader, file, 70, 9000)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        while not caught:
            both_ways(reader, file, 70, 9000)
        for thread in threads:
            thread.join()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not wrong


@pytest.mark.parametrize("keep", [0, 5000, SIZE - 1])
def test_a_file_that_was_cut(tmp_path: Path, reader: ByteReader, keep: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT.tobytes())
    file = IndexedFile.at(path)
    path.write_bytes(CONTENT[:keep].tobytes())
    with pytest.raises(DataError, match=rf"{path}: found {keep:,} bytes, expected {SIZE:,}"):
        reader.read(file, 0, 1)


def test_a_range_past_the_end(file: IndexedFile, reader: ByteReader) -> None:
    with pytest.raises(DataError, match=r"found its end at byte 13,522, expected 14,000 bytes"):
        reader.read(file, 6000, 8000)


def test_a_file_of_another_size(tmp_path: Path, reader: ByteReader) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT.tobytes())
    file = IndexedFile.at(path)
    path.write_bytes(CONTENT.tobytes() + b"more")
    with pytest.raises(DataError, match=r"was cut or replaced since. Start again"):
        reader.read_into(file, 0, np.empty(5, np.uint8))


def test_a_file_that_is_gone(tmp_path: Path, reader: ByteReader) -> None:
    path = tmp_path / "file"
    for file in (IndexedFile(path, 5), IndexedFile.at(path)):
        with pytest.raises(DataError, match=rf"{path}: cannot be read .*No such file"):
            reader.read(file, 0, 5)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_is_forbidden(tmp_path: Path, reader: ByteReader) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT.tobytes())
    file = IndexedFile.at(path)
    path.chmod(0)
    with pytest.raises(DataError, match=rf"{path}: cannot be read .*Permission denied"):
        reader.read(file, 0, 5)


def test_a_directory_in_place_of_a_file(tmp_path: Path, reader: ByteReader) -> None:
    with pytest.raises(DataError, match=rf"{tmp_path}: cannot be read .*[Ii]s a directory"):
        reader.read(IndexedFile.at(tmp_path), 0, 5)


def test_a_file_system_without_direct_reads(caplog: pytest.LogCaptureFixture) -> None:
    """The kernel's own files cannot be read directly; this is said once."""
    version = Path("/proc/version")
    content, reader = version.read_bytes(), DirectReader()
    assert not reader.refused
    with caplog.at_level(logging.WARNING):
        for offset in (0, 3):
            found = reader.read(IndexedFile(version, -1), offset, 9)
            assert found.tobytes() == content[offset : offset + 9]
    assert reader.refused
    (line,) = caplog.messages
    assert "/proc" in line
    assert "buffered reads instead" in line


def test_only_the_file_system_that_refuses_is_read_buffered(
    file: IndexedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = DirectReader()
    reader.read(IndexedFile(Path("/proc/version"), -1), 0, 5)
    whole, flags = os.open, []

    def note(path: Path, flag: int) -> int:
        flags.append(flag & os.O_DIRECT)
        return whole(path, flag)

    monkeypatch.setattr(os, "open", note)
    both_ways(reader, file, 3, 5000)
    assert flags == [os.O_DIRECT] * 2


@pytest.fixture
def in_memory() -> Iterator[Path]:
    path = Path(f"/dev/shm/eagle3-test-{os.getpid()}")
    if not path.parent.is_dir():
        pytest.skip("no file system in memory here")
    path.write_bytes(CONTENT.tobytes())
    yield path
    path.unlink()


def test_a_file_system_in_memory(in_memory: Path, reader: ByteReader) -> None:
    """Old kernels refuse direct reads there, new ones do them."""
    both_ways(reader, IndexedFile.at(in_memory), 70, 9000)


def files(directory: Path) -> list[IndexedFile]:
    found = []
    for number in range(3):
        path = directory / f"{number}"
        path.write_bytes(CONTENT.tobytes() * 20)
        found.append(IndexedFile.at(path))
    return found


@pytest.mark.parametrize("mode", [ReadMode.buffered, ReadMode.direct])
@pytest.mark.parametrize("available", [0, None])
def test_a_mode_by_name(tmp_path: Path, mode: ReadMode, available: int | None) -> None:
    assert choose_reader(mode, files(tmp_path), 2, available).mode is mode


def test_data_that_fit_into_memory_are_read_buffered(tmp_path: Path) -> None:
    found = files(tmp_path)
    total = sum(file.size for file in found)
    assert choose_reader(ReadMode.auto, found, 2, 2 * total).mode is ReadMode.buffered
    assert available_memory() > 2 * total
    assert choose_reader(ReadMode.auto, found, 2).mode is ReadMode.buffered


def test_else_both_are_measured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = files(tmp_path)
    with caplog.at_level(logging.INFO):
        chosen = choose_reader(ReadMode.auto, found, 2, 2 * sum(f.size for f in found) - 1)
    (line,) = caplog.messages
    assert f"{tmp_path}: {chosen.mode} reads: measured direct" in line
    assert "with 2 threads" in line
    assert line.count("GB/s") == 2


def test_files_that_went_bad_do_not_stop_the_measurement(tmp_path: Path) -> None:
    found = files(tmp_path)
    found[1].path.unlink()
    found[2].path.write_bytes(b"short")
    assert choose_reader(ReadMode.auto, found, 2, 0).mode in ReadMode
    found[0].path.unlink()
    assert choose_reader(ReadMode.auto, found, 2, 0).mode is ReadMode.buffered
