"""Writing a native directory: in any order, and again after every kind of trouble."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle3.data import disk
from eagle3.data.native import NativeStore
from eagle3.data.native_manifest import VerifierFacts
from eagle3.data.reading import StateReader
from eagle3.errors import DataError
from tests.data.native_content import LAYOUT, LENGTHS, Content, flip, tree


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete directory that no test changes."""
    return Content().write(tmp_path_factory.mktemp("native") / "states")


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=12),
    shard_bytes=st.integers(1, 1500),
    seed=st.integers(0, 99),
)
def test_shards_of_any_size_written_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], shard_bytes: int, seed: int
) -> None:
    content = Content(tuple(lengths))
    directory = tmp_path_factory.mktemp("any") / "states"
    order = np.random.default_rng(seed)
    with content.writer(directory, shard_bytes=shard_bytes) as writer:
        for number in order.permutation(writer.num_shards).tolist():
            shard = writer.open(number)
            assert shard is not None
            for document in order.permutation(shard.missing).tolist():
                content.fill(shard, document, chunk=int(order.integers(1, 9)))
            writer.finish(shard)
        manifest = writer.complete(VerifierFacts(), "tests")
    for facts in manifest.shards:
        assert facts.num_samples == 1 or facts.num_tokens * 27 <= shard_bytes
    store = NativeStore(directory, LAYOUT)
    reader = StateReader(store, store.stored_index(None))
    for document, (ids, aux) in enumerate(zip(content.ids, content.aux, strict=True)):
        assert torch.equal(reader.sample(document).input_ids, ids)
        assert torch.equal(reader.sample(document).aux_hidden, aux)


def test_many_threads_write_the_same_bytes(written: Path, tmp_path: Path) -> None:
    content = Content()
    with content.writer(tmp_path / "states") as writer, ThreadPoolExecutor(8) as pool:
        shards = [writer.open(number) for number in range(writer.num_shards)]
        jobs = [(shard, document) for shard in shards if shard for document in shard.missing]
        list(pool.map(lambda job: content.fill(*job), reversed(jobs)))
        list(pool.map(writer.finish, [shard for shard in shards if shard]))
        writer.complete(VerifierFacts("toy", "0a1b", None, "fp8"), "tests")
    assert tree(tmp_path / "states") == tree(written)


class FullDisk:
    """A disk that is full from the n-th write on, or at that write only half of it fits."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.lock = threading.Lock()
        self.really_write = os.pwrite

    def pwrite(self, file: int, content: Any, offset: int) -> int:
        with self.lock:
            self.allowed -= 1
            if self.allowed == 0:
                return self.really_write(file, content[: max(len(content) // 2, 1)], offset)
            if self.allowed < 0:
                raise OSError(28, "No space left on device")
            return self.really_write(file, content, offset)


@pytest.mark.parametrize("allowed", [0, 1, 2, 7, 20])
def test_a_full_disk_loses_nothing(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    content, directory = Content(), tmp_path / "states"
    with monkeypatch.context() as patched, content.writer(directory) as writer:
        patched.setattr(disk.os, "pwrite", FullDisk(allowed).pwrite)
        with pytest.raises(DataError, match=r"disk is full .*still to be written.*are free"):
            content.write_shards(writer)
    assert content.write(directory) == directory
    assert tree(directory) == tree(written)


def test_too_little_space_is_seen_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda path: 100)
    with pytest.raises(DataError, match=r"810 bytes will be written, but only 100 bytes are free"):
        Content().writer(tmp_path / "states")
    assert not list((tmp_path / "states").glob("*.safetensors"))


def test_a_disk_that_gives_back_other_bytes_is_found_out(tmp_path: Path) -> None:
    content = Content()
    with content.writer(tmp_path / "states") as writer:
        shard = writer.open(0)
        assert shard is not None
        for document in shard.missing:
            content.fill(shard, document)
        flip(shard.path, 4100)
        with pytest.raises(DataError, match="found other bytes in 1 of 8 ranges"):
            writer.finish(shard)
    content.write(tmp_path / "states")
    assert len(NativeStore(tmp_path / "states", LAYOUT).index) == len(LENGTHS)


@pytest.mark.parametrize("damage", ["torn journal", "lost journal", "flipped byte", "lost shard"])
def test_what_a_crash_leaves_is_compared_and_mended(
    written: Path, tmp_path: Path, damage: str
) -> None:
    content, directory = Content(), tmp_path / "states"
    with content.writer(directory) as writer:
        for number in (0, 2):
            shard = writer.open(number)
            assert shard is not None
            content.fill(shard, shard.missing[0])
            if number == 0:
                content.fill(shard, shard.missing[0])
                writer.finish(shard)
    journal = directory / ".writing" / "journal"
    match damage:
        case "torn journal":
            journal.write_bytes(journal.read_bytes()[:-9])
        case "lost journal":
            journal.write_bytes(b"")
        case "flipped byte":
            flip(directory / ".writing" / "shard-00002.safetensors", 4100)
        case "lost shard":
            (directory / "shard-00000.safetensors").unlink()
    with content.writer(directory) as writer:
        shard = writer.open(2)
        assert shard is not None
        assert len(shard.missing) == (2 if damage == "lost shard" else 3)
        shard.close(sync=False)
    content.write(directory)
    assert tree(directory) == tree(written)


def test_left_out_documents_leave_no_hole(tmp_path: Path) -> None:
    content, directory = Content(), tmp_path / "states"
    with content.writer(directory) as writer:
        for document in (1, 2):  # one of the first shard, all of the second
            writer.skip(document, "spoilt")
        content.write_shards(writer)
        manifest = writer.complete(VerifierFacts(), "tests")
    assert [shard.num_tokens for shard in manifest.shards] == [5, 14]
    store = NativeStore(directory, LAYOUT)
    reader = StateReader(store, store.stored_index(None))
    assert [reader.sample(d).input_ids.tolist() for d in range(4)] == [
        content.ids[d].tolist() for d in (0, 3, 4, 5)
    ]


def test_directories_of_others_are_not_touched(written: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="found a complete native directory"):
        Content().writer(written)
    (tmp_path / "letter.txt").write_text("mine")
    with pytest.raises(DataError, match=r"found letter\.txt, expected an empty directory"):
        Content().writer(tmp_path)
    with Content().writer(tmp_path / "states", job="a"):
        pass
    with pytest.raises(DataError, match=r"another job \(a\).*this one \(b\)"):
        Content().writer(tmp_path / "states", job="b")


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    with (
        Content().writer(tmp_path / "states"),
        pytest.raises(DataError, match="another process that writes this directory"),
    ):
        Content().writer(tmp_path / "states")
    Content().write(tmp_path / "states")
