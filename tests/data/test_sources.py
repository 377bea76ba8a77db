"""Labels of where documents came from."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from eagle3.data.bad_samples import BadSamples
from eagle3.data.corpus import Corpus
from eagle3.data.declaration import Declaration
from eagle3.data.hashing import sample_id
from eagle3.data.index import DocumentIndex, index_records
from eagle3.data.layout import StateLayout
from eagle3.data.shards import Shards, open_shards
from eagle3.data.sources import directory_label, label
from eagle3.data.store import DocumentRecord
from eagle3.errors import DataError
from eagle3.names import LastHidden, LayerIdConvention, TrainOn

HASHES = (0x1111, 0xAAAA0000BBBB1111, 0x3333, 0x4444)
Open = Callable[..., Shards]


def index(*own_labels: str) -> DocumentIndex:
    """Four documents, data_0.pt to data_3.pt, with labels of their own perhaps."""
    labels = own_labels or ("",) * len(HASHES)
    return index_records(
        [
            DocumentRecord(
                file=f"data_{i}.pt",
                length=5,
                runs=np.array([[2, 5]]),
                sample_hash=sample_hash,
                prompt_hash=0,
                dtype="bfloat16",
                ids_offset=0,
                ids_bytes=8,
                state_offsets=(0,),
                source=own,
            )
            for i, (sample_hash, own) in enumerate(zip(HASHES, labels, strict=True))
        ]
    )


def labels_of(index: DocumentIndex, directory: Path, labels_csv: Path | None = None) -> list[str]:
    names, place = label(index, directory, labels_csv)
    assert list(names) == sorted(set(names))
    return [names[i] for i in place]


def sidecar(directory: Path, *lines: str) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / "sources.csv"
    path.write_text("\n".join(("sample_id,source", *lines, "")))
    return path


def test_without_labels_the_directory_names_them(tmp_path: Path) -> None:
    assert labels_of(index(), tmp_path / "kimi") == ["kimi"] * 4


def test_sidecar_by_hash_by_file_and_by_stem(tmp_path: Path) -> None:
    sidecar(tmp_path / "kimi", "data_0,code", "data_2.pt,math", f"{sample_id(HASHES[1])},chat")
    assert labels_of(index(), tmp_path / "kimi") == ["code", "chat", "math", "kimi"]


def test_hash_comes_before_file_name(tmp_path: Path) -> None:
    sidecar(tmp_path / "kimi", "data_1.pt,file", f"{sample_id(HASHES[1])},hash")
    assert labels_of(index(), tmp_path / "kimi")[1] == "hash"


def test_labels_of_the_index_come_before_the_sidecar(tmp_path: Path) -> None:
    sidecar(tmp_path / "kimi", *(f"data_{i},csv" for i in range(4)))
    assert labels_of(index("web", "", "", "web"), tmp_path / "kimi") == ["web", "csv", "csv", "web"]


def test_config_file_replaces_the_sidecar(tmp_path: Path) -> None:
    sidecar(tmp_path / "kimi", "data_0,sidecar")
    other = tmp_path / "labels.csv"
    other.write_text("note,source,sample_id\nx,given,data_1\n")
    assert labels_of(index(), tmp_path / "kimi", other) == ["kimi", "given", "kimi", "kimi"]


def test_spreadsheets_write_byte_order_marks_quotes_and_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    path.write_bytes(b'\xef\xbb\xbfsample_id,source\r\n\r\n"data_0" ,"code"\r\n')
    with pytest.raises(DataError, match=r"line 3: found text that is not CSV"):
        labels_of(index(), tmp_path, path)
    path.write_bytes(b'\xef\xbb\xbfsample_id,source\r\n\r\n"data_0", code \r\n')
    assert labels_of(index(), tmp_path, path)[0] == "code"


def test_unknown_ids_are_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sidecar(tmp_path / "kimi", "data_0,code", "data_7,code", "data_8,code")
    with caplog.at_level(logging.WARNING):
        assert labels_of(index(), tmp_path / "kimi") == ["code", "kimi", "kimi", "kimi"]
    [line] = caplog.messages
    assert "2 of 3 sample ids match no document" in line
    assert "data_7" in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found nothing, expected a first line sample_id,source"),
        ("id,label\na,b\n", "line 1: found the columns id,label, expected sample_id,source"),
        ("data_0,code\n", "line 1: found the columns data_0,code"),
        ("sample_id,source\ndata_0,code\ndata_1\n", "line 3: found 1 values"),
        ("sample_id,source\n,code\n", "line 2: found no sample id"),
        ("sample_id,source\ndata_0,\n", "line 2: found the source ''"),
        ("sample_id,source\ndata_0,a/b\n", r"line 2: found the source 'a/b', expected 1 to 64"),
        ("sample_id,source\ndata_0,-x\n", "line 2: found the source '-x'"),
        ("sample_id,source\ndata_0,a\n\ndata_0,b\n", "line 4: found 'b' for data_0, expected 'a'"),
        ('sample_id,source\n"data_0,a\n', "line 2: found text that is not CSV"),
    ],
    ids=["empty", "header", "no-header", "short", "no-id", "no-label", "slash", "dash", "twice",
         "quote"],
)  # fmt: skip
def test_malformed_file_names_the_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "sources.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        labels_of(index(), tmp_path)
    assert str(path) in str(caught.value)


def test_other_encodings_and_missing_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    with pytest.raises(DataError, match=r"labels\.csv: cannot be read .* paths\.source_labels"):
        labels_of(index(), tmp_path, path)
    path.write_bytes("sample_id,source\ndata_0,caf\xe9\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"labels\.csv: cannot be read .* in UTF-8"):
        labels_of(index(), tmp_path, path)


def test_index_with_unfit_labels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="found 'a b', expected 1 to 64 letters"):
        labels_of(index("a b", "", "", ""), tmp_path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("kimi", "kimi"), ("my data (2)", "my_data__2_"), (".hidden", "hidden"), ("...", "data")],
)
def test_directory_names_become_fit(name: str, expected: str, tmp_path: Path) -> None:
    assert directory_label(tmp_path / name if name != "..." else Path("/")) == expected


def test_relative_directory_has_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kimi").mkdir()
    monkeypatch.chdir(tmp_path / "kimi")
    assert labels_of(index(), Path()) == ["kimi"] * 4


@pytest.fixture
def open_labelled(tmp_path: Path, layout: StateLayout) -> Open:
    def make(directory: Path, source_labels: Path | None = None) -> Shards:
        return open_shards(
            directory,
            layout,
            Declaration((2, 15, 27), LayerIdConvention.entering, LastHidden.pre_norm),
            train_on=TrainOn.assistant,
            max_samples=None,
            cache=tmp_path / "cache",
            bad_samples=BadSamples(0),
            num_workers=1,
            source_labels=source_labels,
        )

    return make


def test_documents_of_several_directories_keep_their_labels(
    shards: Path, write: Callable[..., Path], document: Callable[..., object],
    open_labelled: Open, tmp_path: Path,
) -> None:  # fmt: skip
    sidecar(shards, "data_3,code")
    other = write(tmp_path / "other", [document(9, seed=100 + i) for i in range(2)])
    corpus = Corpus.join([open_labelled(shards), open_labelled(other)])
    assert corpus.sources == ("code", "other", "shards")
    found = [corpus.label(i) for i in range(len(corpus))]
    assert found == ["shards"] * 3 + ["code"] + ["shards"] * 16 + ["other"] * 2


def test_changed_labels_need_no_new_index(shards: Path, open_labelled: Open) -> None:
    """Labels are read at every start, beside the cached index."""
    assert open_labelled(shards).sources == ("shards",)
    sidecar(shards, "data_3,code")
    assert open_labelled(shards).sources == ("code", "shards")
