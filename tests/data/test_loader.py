"""Windows from disks that are slow, stuck or broken, in bounded memory and with few open files."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import eagle3
from eagle3.data import reader_threads
from eagle3.data.bad_samples import BadSamples
from eagle3.data.batch import PackedBatch, Window
from eagle3.data.byte_reader import IndexedFile
from eagle3.data.corpus import Corpus
from eagle3.data.formats import open_store
from eagle3.data.loader import PackReader, WindowLoader
from eagle3.data.packing import PackingRule, segment_documents
from eagle3.data.plan import training_plan
from eagle3.data.reading import StateReader
from eagle3.data.shards import open_shards
from eagle3.errors import DataError
from eagle3.names import LongDocuments, TrainOn
from tests.data.conftest import DECLARED, LAYOUT
from tests.data.disks import Before, Disk, Log, Stuck, slow
from tests.data.windows import reader_threads as threads_now

Make = Callable[..., dict[str, Any]]
Write = Callable[..., Path]
MakeLoader = Callable[..., WindowLoader]


def same(a: PackedBatch, b: PackedBatch) -> bool:
    pairs = [(getattr(a, f.name), getattr(b, f.name)) for f in fields(PackedBatch)]
    return all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in pairs)


def all_same(ours: list[Window], theirs: list[Window]) -> bool:
    return [w.step for w in ours] == [w.step for w in theirs] and all(
        same(a, b)
        for x, y in zip(ours, theirs, strict=True)
        for a, b in zip(x.packs, y.packs, strict=True)
    )


@pytest.fixture
def open_corpus(tmp_path: Path) -> Callable[[Path, Before | None], Corpus]:
    def make(shards: Path, before: Before | None) -> Corpus:
        opened = open_shards(
            shards,
            LAYOUT,
            DECLARED,
            train_on=TrainOn.assistant,
            max_samples=None,
            cache=tmp_path / "cache",
            bad_samples=BadSamples(0),
            num_workers=2,
        )
        if before is not None:
            store = open_store(shards, LAYOUT)
            opened = replace(opened, reader=StateReader(store, opened.index, Disk(before)))
        return Corpus.join([opened])

    return make


@pytest.fixture
def loader(open_corpus: Callable[[Path, Before | None], Corpus]) -> MakeLoader:
    """A loader of all documents; ``before`` is what the disk does before every read."""

    def make(
        shards: Path, before: Before | None = None, max_bad_samples: int = 2, **changes: Any
    ) -> WindowLoader:
        corpus = open_corpus(shards, before)
        rule = PackingRule(16, LongDocuments.split, 4, 3)
        segments = segment_documents(
            range(len(corpus)), corpus.lengths, corpus.gates, rule
        ).segments
        arguments: dict[str, Any] = {
            "plan": training_plan(segments, 16, 0, 0, 1, changes.pop("accumulate", 1)),
            "reader": PackReader(corpus),
            "bad_samples": BadSamples(max_bad_samples),
            "max_seq_len": 16,
            "rank": 0,
            "epoch": 0,
            "num_workers": 2,
            "prefetch_windows": 2,
        }
        return WindowLoader(**(arguments | changes))

    return make


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_pieces_that_come_in_any_order_make_the_same_windows(
    shards: Path, loader: MakeLoader, num_workers: int
) -> None:
    rng = random.Random(num_workers)

    def jitter(file: IndexedFile, offset: int, count: int) -> None:
        time.sleep(rng.random() * 2e-3)

    reference = list(loader(shards, accumulate=3, num_workers=1, prefetch_windows=0))
    found = list(loader(shards, jitter, accumulate=3, num_workers=num_workers))
    assert all_same(found, reference)
    assert [w.read_bytes for w in found] == [w.read_bytes for w in reference]


@pytest.mark.parametrize("prefetch_windows", [0, 1, 3])
@pytest.mark.parametrize("start_step", [0, 1, 4])
def test_an_epoch_begins_at_any_step(
    shards: Path, loader: MakeLoader, start_step: int, prefetch_windows: int
) -> None:
    whole = loader(shards)
    rest = loader(shards, start_step=start_step, prefetch_windows=prefetch_windows)
    assert len(rest) == len(whole) > 4
    assert all_same(list(rest), list(whole)[start_step:])


def test_an_epoch_that_was_trained_has_no_windows(shards: Path, loader: MakeLoader) -> None:
    assert list(loader(shards, start_step=len(loader(shards)))) == []


def test_a_slow_disk_makes_the_training_wait(shards: Path, loader: MakeLoader) -> None:
    windows = list(loader(shards, slow(2e-3), prefetch_windows=0))
    assert all(window.wait_s > 0 for window in windows)


@pytest.mark.parametrize("prefetch_windows", [0, 1, 3])
def test_no_more_is_read_ahead_than_asked_for(
    shards: Path, loader: MakeLoader, prefetch_windows: int
) -> None:
    log = Log()
    windows = loader(shards, log, prefetch_windows=prefetch_windows)
    files = windows.reader.corpus.parts[0].index.files
    allowed: set[str] = set()
    needed = [
        {files[segment.document] for pack in windows.plan.rank_window(step, 0) for segment in pack}
        for step in range(len(windows))
    ]
    for window in windows:
        allowed |= set().union(*needed[: window.step + 1 + prefetch_windows])
        assert needed[window.step] <= log.files <= allowed
        deadline = time.monotonic() + 0.02
        while log.files < allowed and time.monotonic() < deadline:
            time.sleep(1e-3)
    assert log.files == allowed == set(files)


def test_memory_is_used_again(shards: Path, loader: MakeLoader) -> None:
    """Two windows ahead, one in training, and the one before it until its last user is gone."""
    windows = loader(shards, prefetch_windows=2)
    places = set()
    for window in windows:
        places.add(window.packs[0].aux_hidden.data_ptr())
    assert len(windows) > 8
    assert len(places) <= 5


def test_windows_that_are_kept_keep_their_memory(shards: Path, loader: MakeLoader) -> None:
    kept = list(loader(shards))
    assert len({window.packs[0].aux_hidden.data_ptr() for window in kept}) == len(kept)
    assert all_same(kept, list(loader(shards)))


def test_leaving_early_ends_the_threads_and_the_reading(shards: Path, loader: MakeLoader) -> None:
    log = Log()
    windows: Iterator[Window] = iter(loader(shards, log, prefetch_windows=99))
    next(windows)
    windows.close()  # type: ignore[attr-defined]
    assert not threads_now()
    count = len(log.reads)
    time.sleep(0.02)
    assert len(log.reads) == count


def test_a_broken_thread_breaks_the_loop(shards: Path, loader: MakeLoader) -> None:
    """An error that nobody foresaw comes out of the loop, and names the file."""

    def broken(file: IndexedFile, offset: int, count: int) -> None:
        if file.path.name == "data_7.pt":
            raise MemoryError("no memory left")

    with pytest.raises(MemoryError, match="no memory left") as caught:
        list(loader(shards, broken))
    assert caught.value.__notes__ == [f"while reading {shards / 'data_7.pt'}"]
    del caught
    assert not threads_now()


def test_a_disk_that_does_not_answer_can_be_interrupted(
    shards: Path,
    loader: MakeLoader,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Ctrl-C while the training waits; the threads end when the disk answers at last."""
    monkeypatch.setattr(reader_threads, "_PATIENCE_S", 0.05)
    stuck = Stuck()

    def press() -> None:
        stuck.reached.wait()
        os.kill(os.getpid(), signal.SIGINT)

    finger = threading.Thread(target=press)
    finger.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            list(loader(shards, stuck))
    finally:
        stuck.released.set()
        finger.join()
    assert "reader threads still wait for the disk" in caplog.text
    deadline = time.monotonic() + 20
    while threads_now() and time.monotonic() < deadline:
        time.sleep(1e-3)
    assert not threads_now()


@pytest.mark.parametrize("num_workers", [1, 4])
def test_several_bad_documents_of_a_pack_are_left_out_at_once(
    tmp_path: Path, document: Make, write: Write, loader: MakeLoader, num_workers: int
) -> None:
    """The first piece that is bad gives the reason, whichever thread meets its one first."""
    documents = [document(4, seed, prompt=0) for seed in range(5)]
    for bad, layers in ((1, (0, 2)), (3, (1, 3))):
        for layer in layers:
            documents[bad]["hidden_states"][layer][layer % 3, 0] = float("nan")
    (window,) = loader(write(tmp_path / "s", documents), num_workers=num_workers)
    assert window.packs[0].num_rows == 3 * 3
    lines = sorted(window.bad_samples)
    assert [f"data_{n}.pt" in line for n, line in zip((1, 3), lines, strict=True)] == [True, True]
    assert "the first is token 0;" in lines[0]
    assert "the first is token 1;" in lines[1]
    good = [torch.cat(documents[n]["hidden_states"][:3], dim=1)[:-1] for n in (0, 2, 4)]
    found = window.packs[0].aux_hidden[:9]
    assert sorted(found.tolist()) == sorted(torch.cat(good).tolist())
    assert not window.packs[0].aux_hidden[9:].any()


def test_bad_samples_above_the_limit_stop_with_the_list(
    tmp_path: Path, document: Make, write: Write, loader: MakeLoader
) -> None:
    documents = [document(9, seed) for seed in range(6)]
    windows = loader(write(tmp_path / "s", documents), max_bad_samples=1)
    for bad in (1, 4):
        (tmp_path / "s" / f"data_{bad}.pt").unlink()
    with pytest.raises(DataError, match=r"2 bad samples, data\.max_bad_samples allows 1") as caught:
        list(windows)
    assert all(f"data_{bad}.pt" in str(caught.value) for bad in (1, 4))
    del caught
    assert not threads_now()


def test_a_pack_is_read_without_threads_too(shards: Path, loader: MakeLoader) -> None:
    windows = loader(shards)
    (window, *_) = windows
    (pack,) = windows.plan.rank_window(0, 0)
    loaded = windows.reader.load(pack, 16, epoch=0, place=windows.plan.place(0, 0, 0))
    assert same(loaded.batch, window.packs[0])
    assert loaded.read_bytes == window.read_bytes


def test_few_file_descriptors_are_enough(tmp_path: Path, document: Make, write: Write) -> None:
    """Fifty samples, two reader threads, two epochs, at most 128 open files."""
    shards = write(tmp_path / "s", [document(9, seed) for seed in range(50)])
    script = f"""
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
        import numpy as np
        from eagle3.data.bad_samples import BadSamples
        from eagle3.data.corpus import Corpus
        from eagle3.data.declaration import Declaration
        from eagle3.data.layout import StateLayout
        from eagle3.data.loader import PackReader, WindowLoader
        from eagle3.data.packing import PackingRule, segment_documents
        from eagle3.data.plan import training_plan
        from eagle3.data.shards import open_shards
        from eagle3.names import LastHidden, LayerIdConvention, LongDocuments, TrainOn

        bad = BadSamples(0)
        declared = Declaration((1, 2, 3), LayerIdConvention.entering, LastHidden.pre_norm)
        corpus = Corpus.join([open_shards(
            {str(shards)!r}, StateLayout(3, 4, 50), declared, train_on=TrainOn.assistant,
            max_samples=None, cache={str(tmp_path / "cache")!r}, bad_samples=bad, num_workers=2,
        )])
        rule = PackingRule(400, LongDocuments.split, 4, 3)
        segments = segment_documents(np.arange(50), corpus.lengths, corpus.gates, rule).segments
        kept = []
        for epoch in range(2):
            plan = training_plan(segments, 400, 0, epoch, 1, 1)
            kept += WindowLoader(plan, PackReader(corpus), bad, 400, 0, epoch, 2, 2)
        print(sum(pack.num_rows for window in kept for pack in window.packs))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(eagle3.__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 2 * 50 * 8
