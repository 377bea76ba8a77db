"""Many files at once: in threads and in processes the same, and nothing is left behind."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from eagle3.data import index, probing
from eagle3.data.bad_samples import BadSamples
from eagle3.data.formats import open_store
from eagle3.data.layout import StateLayout
from eagle3.data.probing import probe_files
from eagle3.data.speculators_v1 import SpeculatorsV1
from eagle3.data.store import Store
from eagle3.errors import DataError

Make = Callable[..., dict[str, Any]]
Write = Callable[..., Path]


@pytest.fixture
def store(tmp_path: Path, document: Make, write: Write, layout: StateLayout) -> SpeculatorsV1:
    """150 files, two of them bad."""
    shards = write(tmp_path / "s", [document(3 + seed % 9, seed) for seed in range(150)])
    (shards / "data_70.pt").write_bytes(b"bad")
    wide = document(5)
    wide["hidden_states"].pop()
    write(tmp_path / "other", [wide])
    (tmp_path / "other" / "data_0.pt").replace(shards / "data_149.pt")
    return SpeculatorsV1(shards, layout)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes also for few files, and also on one core."""
    monkeypatch.setattr(probing, "_MANY_FILES", 100)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})


def outcomes(store: Store, num_workers: int) -> list[Any]:
    found = []
    for results in probe_files(store, store.files, num_workers):
        for result in results:
            if isinstance(result, DataError):
                found.append((type(result), str(result)))
            else:
                found += [(r.file, r.length, r.sample_hash, r.runs.tolist()) for r in result]
    return found


@pytest.mark.usefixtures("processes")
def test_processes_find_what_threads_find(store: SpeculatorsV1) -> None:
    alone, shared = outcomes(store, 1), outcomes(store, 2)
    assert shared == alone
    assert len(shared) == 150
    assert [place for place, found in enumerate(shared) if isinstance(found[0], type)] == [70, 149]


@pytest.mark.usefixtures("processes")
def test_processes_open_the_arrow_rows_by_themselves(
    tmp_path: Path, document: Make, layout: StateLayout
) -> None:
    pytest.importorskip("pyarrow")
    from tests.data.speculators_files import write_arrow, write_states

    documents = [document(3 + seed % 9, seed) for seed in range(100)]
    for number, content in enumerate(documents):
        write_states(tmp_path, number, content)
    write_arrow(tmp_path, documents)
    store = open_store(tmp_path, layout)
    assert len(pickle.dumps(store)) < 10_000, "its place, not its rows"
    assert outcomes(store, 2) == outcomes(store, 1)


@pytest.mark.usefixtures("processes")
def test_processes_end_when_nobody_wants_more(
    store: SpeculatorsV1, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def watched(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(start(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", watched)
    with closing(probe_files(store, store.files, 2)) as results:
        assert len(next(results)) == 64
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)


@pytest.mark.usefixtures("processes")
def test_process_that_died_is_named(store: SpeculatorsV1, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(DataError, match=r"exit code 1.*data\.num_workers=1"):
        outcomes(store, 2)


def test_processes_import_no_torch() -> None:
    code = "import eagle3.data.probe_worker, sys; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"


def test_large_directory_reports_progress(
    tmp_path: Path,
    store: SpeculatorsV1,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(index, "_PROGRESS_S", -1.0)
    with caplog.at_level(logging.INFO, "eagle3"):
        found = index.build_index(store, tmp_path / "cache", BadSamples(2), 2)
    assert len(found) == 148
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith(f"indexing {store.directory}: 64 of 150 files (43%), ")
    assert lines[0].endswith("files/s, 0:00 left")
    assert lines[-1].startswith(f"indexed {store.directory}: 150 files, ")
