"""Training from a directory that another process is still filling."""

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.data.bad_samples import BadSamples
from eagle3.data.batch import Window
from eagle3.data.declaration import Declaration
from eagle3.data.growing import Agree, GrowingDirectory, Patience
from eagle3.data.growing_loader import GrowingLoader
from eagle3.data.layout import StateLayout
from eagle3.data.settings import DataSettings
from eagle3.data.splits import open_validation
from eagle3.data.store import DocumentRecord
from eagle3.errors import DataError
from tests.data import slow_writer
from tests.data.arrivals import IMPATIENT, ORDER, QUICK, begin, fill, writer_process
from tests.data.speculators_files import Document, write_arrow, write_capture
from tests.data.windows import chain_starts, reader_threads

MakeLoader = Callable[..., GrowingLoader]


@pytest.fixture
def documents(document: Callable[..., Document]) -> list[Document]:
    return [document(6 + 5 * i % 17, seed=i) for i in range(8)]


@pytest.fixture
def staged(documents: list[Document], write: Callable[..., Path], tmp_path: Path) -> Path:
    """The files before they arrive."""
    return write(tmp_path / "staged", documents)


@pytest.fixture
def arriving(tmp_path: Path) -> Path:
    return tmp_path / "arriving"


@pytest.fixture
def loader(build: Callable[..., Any], layout: StateLayout, arriving: Path) -> MakeLoader:
    """A loader of ``arriving``; settings can be replaced."""

    def make(
        *,
        patience: Patience = QUICK,
        agree: Agree = lambda names: names,
        group_rows: int = 40,
        limit: int = 0,
        leave_out: Callable[[DocumentRecord], bool] = lambda record: False,
        **changes: Any,
    ) -> GrowingLoader:
        settings: DataSettings = build(arriving, **({"max_seq_len": 32} | changes)).settings
        bad_samples = BadSamples(limit)
        source = GrowingDirectory(
            arriving,
            layout,
            bad_samples,
            arrow=settings.arrow,
            patience=patience,
            rank=settings.rank,
            agree=agree,
        )
        return GrowingLoader(source, settings, bad_samples, group_rows, leave_out)

    return make


def rows_of(documents: list[Document]) -> list[tuple[float, ...]]:
    """The aux states of all rows that can be trained, as ``chain_starts`` names them."""
    return sorted(
        tuple(row)
        for document in documents
        for row in torch.cat(document["hidden_states"][:-1], dim=1)[:-1].float().tolist()
    )


def order_of(windows: list[Window], documents: list[Document]) -> list[int]:
    """Documents in the order in which they were trained."""
    first_rows = {
        tuple(torch.cat(document["hidden_states"][:-1], dim=1)[0].float().tolist()): number
        for number, document in enumerate(documents)
    }
    rows = [
        tuple(row)
        for window in windows
        for pack in window.packs
        for row in pack.aux_hidden[pack.position_ids == 0].float().tolist()
    ]
    return [first_rows[row] for row in rows if row in first_rows]


@pytest.mark.parametrize("how", ["rename", "in-place"])
def test_every_document_is_trained_once_while_they_arrive(
    how: str, staged: Path, arriving: Path, loader: MakeLoader, documents: list[Document]
) -> None:
    growing_loader = loader()
    with writer_process(staged, arriving, how=how):
        windows = list(growing_loader)
    assert chain_starts(windows) == rows_of(documents)
    assert [window.step for window in windows] == list(range(len(windows)))
    assert len(growing_loader.bad_samples) == 0
    assert not reader_threads()


def test_order_is_the_one_of_arrival(
    staged: Path, arriving: Path, loader: MakeLoader, documents: list[Document]
) -> None:
    with writer_process(staged, arriving):
        assert order_of(list(loader(group_rows=1)), documents) == ORDER


def test_the_first_documents_are_trained_before_the_last_ones_exist(
    staged: Path, arriving: Path, loader: MakeLoader, documents: list[Document]
) -> None:
    begin(arriving, staged / "data_0.pt")
    windows = iter(loader(group_rows=1))
    assert chain_starts([next(windows)]) == rows_of(documents[:1])
    fill(staged, arriving)
    assert chain_starts(windows) == rows_of(documents[1:])


def test_groups_do_not_depend_on_when_somebody_looked(
    staged: Path, arriving: Path, loader: MakeLoader
) -> None:
    """Seen while they arrive, and all at once afterwards: the same windows."""
    with writer_process(staged, arriving):
        slow = list(loader())
    at_once = list(loader())
    assert len(slow) == len(at_once)
    for ours, theirs in zip(slow, at_once, strict=True):
        for a, b in zip(ours.packs, theirs.packs, strict=True):
            assert a.input_ids.equal(b.input_ids)
            assert a.aux_hidden.equal(b.aux_hidden)
            assert (a.epoch, a.index) == (b.epoch, b.index)


def test_no_two_packs_share_their_noise(staged: Path, arriving: Path, loader: MakeLoader) -> None:
    fill(staged, arriving)
    keys = [(p.epoch, p.index) for window in loader() for p in window.packs]
    assert len(keys) == len(set(keys)) > 2


class Exchange:
    """Two ranks in two threads: rank 1 gets what rank 0 says."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=30)
        self._said: list[str] = []
        self.calls = [0, 0]

    def agree(self, rank: int) -> Agree:
        def exchange(names: list[str]) -> list[str]:
            self.calls[rank] += 1
            if rank == 0:
                self._said = names
            else:
                assert names == []
            self._barrier.wait()
            said = list(self._said)
            self._barrier.wait()
            return said

        return exchange


def both_ranks(loader: MakeLoader, exchange: Exchange, **changes: Any) -> list[list[Window]]:
    def run(rank: int) -> list[Window]:
        return list(loader(rank=rank, world_size=2, agree=exchange.agree(rank), **changes))

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(run, rank) for rank in range(2)]
        return [future.result() for future in futures]


def test_two_ranks_get_disjoint_and_complete_parts(
    staged: Path, arriving: Path, loader: MakeLoader, documents: list[Document]
) -> None:
    exchange = Exchange()
    with writer_process(staged, arriving):
        first, second = both_ranks(loader, exchange)
    assert len(first) == len(second)
    assert chain_starts(first)
    assert chain_starts(second)
    assert chain_starts(first + second) == rows_of(documents)
    assert exchange.calls[0] == exchange.calls[1]


def test_two_ranks_fail_together(staged: Path, arriving: Path, loader: MakeLoader) -> None:
    begin(arriving, staged / "data_0.pt")
    exchange = Exchange()
    messages = []

    def run(rank: int) -> None:
        with pytest.raises(DataError) as caught:
            list(loader(rank=rank, world_size=2, agree=exchange.agree(rank), patience=IMPATIENT))
        messages.append(str(caught.value))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
    assert messages[0] == messages[1]
    assert "found nothing new" in messages[0]


def test_validation_documents_are_left_out(
    staged: Path, arriving: Path, loader: MakeLoader, documents: list[Document]
) -> None:
    fill(staged, arriving)
    prompts: set[int] = set()

    def every_second(record: DocumentRecord) -> bool:
        prompts.add(record.prompt_hash)
        return len(prompts) % 2 == 0

    found = chain_starts(loader(leave_out=every_second))
    assert found == rows_of(documents[::2])


def test_nothing_to_train_on_is_an_error(staged: Path, arriving: Path, loader: MakeLoader) -> None:
    fill(staged, arriving)
    with pytest.raises(DataError, match="found 8 documents and no supervised row"):
        list(loader(leave_out=lambda record: True))


def test_no_more_windows_than_wanted(staged: Path, arriving: Path, loader: MakeLoader) -> None:
    """The last one comes at once, though the capture goes on."""
    begin(arriving, *staged.glob("data_*.pt"))
    growing_loader = replace(loader(group_rows=1, patience=IMPATIENT), max_steps=5)
    assert [window.step for window in growing_loader] == [0, 1, 2, 3, 4]
    assert not reader_threads()


def test_states_of_another_kind_are_refused(
    document: Callable[..., Document],
    write: Callable[..., Path],
    build: Callable[..., Any],
    staged: Path,
    arriving: Path,
    loader: MakeLoader,
    tmp_path: Path,
) -> None:
    other = write(tmp_path / "other", [document(9, seed=i, dtype=torch.float32) for i in range(4)])
    settings = build(arriving, val_directory=other).settings
    validation = open_validation(settings, BadSamples(0)).corpus.parts[0]
    fill(staged, arriving)
    with pytest.raises(DataError, match=r"bfloat16, expected torch\.float32 as in .*other"):
        list(replace(loader(), same_as=validation))


def test_closing_early_ends_the_reader_threads(
    staged: Path, arriving: Path, loader: MakeLoader
) -> None:
    fill(staged, arriving)
    windows = iter(loader(group_rows=1000, max_seq_len=16))
    next(windows)
    assert reader_threads()
    windows.close()  # type: ignore[attr-defined]
    assert not reader_threads()


def test_time_waited_for_arrival_is_waiting(
    staged: Path, arriving: Path, loader: MakeLoader
) -> None:
    fill(staged, arriving)

    def slow(names: list[str]) -> list[str]:
        time.sleep(0.1)
        return names

    first, *_ = loader(agree=slow)
    assert first.wait_s >= 0.1


def test_what_is_declared_nowhere_is_an_error(
    staged: Path, arriving: Path, loader: MakeLoader
) -> None:
    facts = {"layer_ids": [1, 2, 3], "layer_id_convention": "after", "last_hidden": "post_norm"}
    begin(arriving, staged / "data_0.pt")
    with pytest.raises(DataError, match=r"add:\n.*data\.aux_layer_ids") as caught:
        next(iter(loader(group_rows=1, declaration=Declaration())))
    assert "Whoever runs the capture knows" in str(caught.value)
    (arriving / ".capture.json").write_text(json.dumps({"hidden_states": facts}))
    next(iter(loader(group_rows=1, declaration=Declaration())))


def test_states_of_speculators_arrive_too(
    documents: list[Document], arriving: Path, loader: MakeLoader, tmp_path: Path
) -> None:
    """The data set is there from the start; its path may be given."""
    prepared = tmp_path / "prepared"
    whole = write_capture(prepared, documents)
    names = [f"hs_{i}.safetensors" for i in ORDER]
    writer = threading.Thread(
        target=slow_writer.main, args=(whole, arriving, 0.02, "in-place", names)
    )
    write_arrow(tmp_path / "elsewhere", documents)
    arriving.mkdir()
    (arriving / ".capture.json").touch()
    writer.start()
    windows = list(loader(group_rows=1, arrow=tmp_path / "elsewhere"))
    writer.join()
    assert order_of(windows, documents) == ORDER
    assert chain_starts(windows) == rows_of(documents)


def test_labels_of_arriving_documents(staged: Path, arriving: Path, loader: MakeLoader) -> None:
    fill(staged, arriving)
    (arriving / "sources.csv").write_text("sample_id,source\ndata_0,code\ndata_99,code\n")
    sources = [s for w in loader() for p in w.packs for s in p.document_sources]
    assert sorted(sources) == ["arriving"] * 7 + ["code"]
