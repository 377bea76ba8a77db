"""Directories of speculators 0.9: safetensors files and the Arrow data set beside them."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.data.bad_samples import BadSamples
from eagle3.data.declaration import Declaration, resolve_declaration
from eagle3.data.formats import has_documents, open_store
from eagle3.data.index import build_index
from eagle3.data.layout import LayoutError, StateLayout
from eagle3.data.reading import StateReader
from eagle3.data.speculators import Speculators
from eagle3.errors import DataError
from tests.data.speculators_files import Document, write_arrow, write_capture, write_states

Make = Callable[..., Document]


@pytest.fixture
def documents(document: Make) -> list[Document]:
    """Twelve, so that row 10 comes after row 9."""
    return [document(5 + 7 * i % 27, seed=i) for i in range(12)]


@pytest.fixture
def states(tmp_path: Path, documents: list[Document]) -> Path:
    return write_capture(tmp_path / "prepared", documents)


def rewrite(path: Path, **changes: torch.Tensor | None) -> None:
    """Save a file again with tensors replaced, or left out where None."""
    content: dict[str, Any] = load_file(path) | changes
    save_file({key: value for key, value in content.items() if value is not None}, path)


def refusal(states: Path, layout: StateLayout, number: int = 0) -> str:
    with pytest.raises(DataError) as caught:
        open_store(states, layout).probe(f"hs_{number}.safetensors")
    return str(caught.value)


def test_documents_are_the_ones_written(
    states: Path, documents: list[Document], layout: StateLayout, tmp_path: Path
) -> None:
    store = open_store(states, layout)
    index = build_index(store, tmp_path / "cache", BadSamples(0), num_workers=2)
    assert index.files == tuple(f"hs_{i}.safetensors" for i in range(12))
    reader = StateReader(store, index)
    for number, document in enumerate(documents):
        sample = reader.sample(number)
        *aux, last = document["hidden_states"]
        assert sample.input_ids.equal(document["input_ids"])
        assert sample.loss_mask.equal(document["loss_mask"].bool())
        assert sample.aux_hidden.equal(torch.cat(aux, dim=1))
        assert sample.last_hidden.equal(last)


def test_same_documents_as_v1_have_the_same_identity(
    states: Path,
    documents: list[Document],
    write: Callable[..., Path],
    layout: StateLayout,
    tmp_path: Path,
) -> None:
    v1 = open_store(write(tmp_path / "v1", documents), layout)
    indexes = [
        build_index(store, tmp_path / "cache", BadSamples(0), 1)
        for store in (open_store(states, layout), v1)
    ]
    assert indexes[0].fingerprint == indexes[1].fingerprint
    assert indexes[0].prompt_hash.tolist() == indexes[1].prompt_hash.tolist()


@pytest.mark.parametrize("place", ["parent", "itself", "given"])
def test_arrow_is_found_where_it_may_be(
    place: str, documents: list[Document], layout: StateLayout, tmp_path: Path
) -> None:
    states = tmp_path / "deep" / "states"
    write_states(states, 3, documents[3])
    arrow = {"parent": tmp_path / "deep", "itself": states, "given": tmp_path / "elsewhere"}[place]
    write_arrow(arrow, documents)
    store = open_store(states, layout, arrow if place == "given" else None)
    [record] = store.probe("hs_3.safetensors")
    assert record.length == len(documents[3]["input_ids"])


def test_missing_arrow_names_the_config_key(
    documents: list[Document], layout: StateLayout, tmp_path: Path
) -> None:
    write_states(tmp_path / "a" / "states", 0, documents[0])
    with pytest.raises(DataError, match=r"no Arrow data set .* Set paths\.arrow"):
        open_store(tmp_path / "a" / "states", layout)
    with pytest.raises(DataError, match="nowhere; expected the one that was captured"):
        open_store(tmp_path / "a" / "states", layout, tmp_path / "nowhere")


def test_prepared_directory_names_the_one_inside(states: Path, layout: StateLayout) -> None:
    assert has_documents(states)
    assert not has_documents(states.parent)
    with pytest.raises(DataError, match=rf"Set paths\.shards={states}\."):
        open_store(states.parent, layout)


def test_two_formats_in_one_directory_are_refused(
    states: Path, documents: list[Document], write: Callable[..., Path], layout: StateLayout
) -> None:
    write(states, documents[:1])
    with pytest.raises(DataError, match=r"speculators v1 .* and speculators 0\.9 .* one format"):
        open_store(states, layout)


def test_without_pyarrow_the_extra_is_named(
    states: Path, layout: StateLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # importing it fails from here on
    with pytest.raises(DataError, match=r"pip install 'eagle3\[speculators\]'"):
        open_store(states, layout)


def test_nothing_is_declared_and_the_writers_habit_is_a_hint(
    states: Path, layout: StateLayout
) -> None:
    store = open_store(states, layout)
    assert store.declaration().declaration == Declaration()
    with pytest.raises(DataError, match=r"speculators 0\.9 .*\(entering\) .* pre_norm") as caught:
        resolve_declaration(Declaration(), store.declaration(), 3, states)
    assert "data.aux_layer_ids=" in str(caught.value)
    assert "v0.3" not in str(caught.value)


def test_data_config_declares(states: Path, layout: StateLayout) -> None:
    facts = {
        "layer_ids": [2, 15, 27, 30],
        "layer_id_convention": "entering",
        "last_hidden": "pre_norm",
    }
    (states / "data_config.json").write_text(json.dumps({"hidden_states": facts}))
    found = resolve_declaration(Declaration(), open_store(states, layout).declaration(), 3, states)
    assert found.aux_layer_ids == (2, 15, 27)


def test_a_changed_mask_makes_a_new_index(
    states: Path, documents: list[Document], layout: StateLayout, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    first = build_index(open_store(states, layout), cache, BadSamples(0), 1)
    everything = [[1] * len(document["input_ids"]) for document in documents]
    write_arrow(states.parent, documents, files=2, loss_mask=everything)
    second = build_index(open_store(states, layout), cache, BadSamples(0), 1)
    assert first.runs.totals().tolist() != second.runs.totals().tolist()
    assert second.runs.totals().tolist() == second.lengths.tolist()


def other_ids(path: Path, document: Document) -> None:
    ids = document["input_ids"].clone()
    ids[2] = (ids[2] + 1) % 50
    rewrite(path, token_ids=ids)


def states_of(path: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    rewrite(path, hidden_states=change(load_file(path)["hidden_states"]).contiguous())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        pytest.param(other_ids, r"key 'token_ids': found \d+ at token 2, expected", id="ids"),
        pytest.param(
            lambda p, d: rewrite(p, token_ids=d["input_ids"][:-1].clone()),
            r"key 'hidden_states': found 5 rows, expected 4",
            id="lengths",
        ),
        pytest.param(
            lambda p, d: (
                states_of(p, lambda s: s[:-1]),
                rewrite(p, token_ids=d["input_ids"][:-1].clone()),
            ),
            r"found 4 tokens, expected 5 as",
            id="both-shorter-than-the-row",
        ),
        pytest.param(
            lambda p, d: rewrite(p, token_ids=d["input_ids"].int()),
            r"found int32 \[5\], expected int64 \[n\]",
            id="dtype-of-ids",
        ),
        pytest.param(
            lambda p, d: states_of(p, lambda s: s.to(torch.float8_e4m3fn)),
            "found float8_e4m3fn.* in 8 bits",
            id="compressed",
        ),
        pytest.param(
            lambda p, d: states_of(p, torch.Tensor.int), "found int32, expected bf", id="integers"
        ),
        pytest.param(
            lambda p, d: rewrite(p, token_ids=None),
            "key 'token_ids' is missing: found hidden_states",
            id="no-ids",
        ),
        pytest.param(lambda p, d: p.unlink(), "cannot be read", id="deleted"),
    ],
)
def test_bad_file_has_its_own_message(
    spoil: Callable[[Path, Document], object],
    message: str,
    states: Path,
    documents: list[Document],
    layout: StateLayout,
) -> None:
    path = states / "hs_0.safetensors"
    spoil(path, documents[0])
    with pytest.raises(DataError, match=message) as caught:
        open_store(states, layout).probe(path.name)
    assert str(path) in str(caught.value)
    assert not isinstance(caught.value, LayoutError)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda s: s[:, :3], "expected 4 layers .* model.num_aux_layers=2", id="K"),
        pytest.param(lambda s: s[:, :, :3], "found hidden size 3, expected 4", id="H"),
        pytest.param(
            lambda s: s.flatten(1), r"found shape \[5, 16\], expected \[n, 4, 4\]", id="2d"
        ),
    ],
)
def test_other_sizes_are_mistakes_of_the_config(
    change: Callable[[torch.Tensor], torch.Tensor], message: str, states: Path, layout: StateLayout
) -> None:
    states_of(states / "hs_0.safetensors", change)
    with pytest.raises(LayoutError, match=message):
        open_store(states, layout).probe("hs_0.safetensors")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"loss_mask": None}, "expected loss_mask among them"),
        ({"input_ids": [["a"]] * 12}, "key 'input_ids': found list<item: string>"),
        ({"loss_mask": [None] * 12}, "key 'loss_mask': found null with nothing in it"),
        ({"loss_mask": [[0, 1]] * 12}, "key 'loss_mask': found length 2, expected 5"),
        ({"loss_mask": [[0, 1, 2, 3, 4]] * 12}, "other than 0 and 1"),
        ({"seq_len": [6] * 12}, "key 'seq_len': found 6, expected 5"),
    ],
    ids=["no-mask", "text", "null", "short", "values", "seq-len"],
)
def test_bad_row_has_its_own_message(
    columns: dict[str, Any],
    message: str,
    states: Path,
    documents: list[Document],
    layout: StateLayout,
) -> None:
    write_arrow(states.parent, documents, files=2, **columns)
    assert message in refusal(states, layout)


def test_masks_may_be_bool_and_seq_len_missing(
    states: Path, documents: list[Document], layout: StateLayout
) -> None:
    masks = [document["loss_mask"].bool().tolist() for document in documents]
    write_arrow(states.parent, documents, loss_mask=masks, seq_len=None)
    [record] = open_store(states, layout).probe("hs_0.safetensors")
    assert record.runs.tolist() == [[1, 5]]


def test_a_file_past_the_last_row(
    states: Path, documents: list[Document], layout: StateLayout
) -> None:
    write_states(states, 12, documents[0])
    assert "which has 12, expected row 12" in refusal(states, layout, 12)


def break_state(prepared: Path) -> None:
    (prepared / "state.json").write_text("{}")


def cut_rows(prepared: Path) -> None:
    path = prepared / "data-00000-of-00002.arrow"
    path.write_bytes(path.read_bytes()[:100])


def several_splits(prepared: Path) -> None:
    (prepared / "dataset_dict.json").write_text('{"splits": ["train"]}')


def lead_outside(prepared: Path) -> None:
    (prepared / "state.json").write_text('{"_data_files": [{"filename": "../secret.arrow"}]}')


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (break_state, "state.json: key '_data_files': found no list"),
        (cut_rows, "data-00000-of-00002.arrow: cannot be read as an Arrow stream"),
        (several_splits, "Set paths.arrow to the directory of that split"),
        (lead_outside, "expected names of files beside it"),
    ],
)
def test_damaged_arrow_directory_is_refused(
    spoil: Callable[[Path], None], message: str, states: Path, layout: StateLayout
) -> None:
    spoil(states.parent)
    with pytest.raises(DataError) as caught:
        open_store(states, layout)
    assert message in str(caught.value)


def test_foreign_files_are_not_listed(states: Path, layout: StateLayout) -> None:
    for name in ("hs_1.safetensors.lock", "hs_x.safetensors", ".hs_2.safetensors.tmp"):
        (states / name).touch()
    store = open_store(states, layout)
    assert isinstance(store, Speculators)
    assert len(store.files) == 12
    assert store.files[-2:] == ("hs_10.safetensors", "hs_11.safetensors")
