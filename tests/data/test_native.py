"""Native directories: what is written is what is read, and what is damaged is refused."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from eagle3.data.bad_samples import BadSamples
from eagle3.data.batch import PackedBatch
from eagle3.data.datamodule import ShardDataModule
from eagle3.data.declaration import Declaration, resolve_declaration
from eagle3.data.formats import has_documents, open_store
from eagle3.data.index import DocumentIndex, build_index, index_records
from eagle3.data.layout import LayoutError
from eagle3.data.native import NativeStore, read_layout
from eagle3.data.native_manifest import VerifierFacts, read_manifest
from eagle3.data.native_shard import TENSORS
from eagle3.data.reading import StateReader
from eagle3.errors import DataError
from eagle3.names import LastHidden
from tests.converting import run
from tests.data.native_content import LAYOUT, LENGTHS, Content


def index_of(directory: Path, tmp_path: Path, max_samples: int | None = None) -> DocumentIndex:
    store = open_store(directory, LAYOUT)
    return build_index(store, tmp_path / "cache", BadSamples(0), 1, max_samples)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete directory that no test changes."""
    return Content().write(tmp_path_factory.mktemp("native") / "states")


@pytest.fixture
def native(tmp_path: Path) -> Path:
    """A complete directory to spoil."""
    return Content().write(tmp_path / "states")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_what_is_written_is_read(tmp_path: Path, dtype: str) -> None:
    content = Content(dtype=dtype)
    store = open_store(content.write(tmp_path / "states"), LAYOUT)
    reader = StateReader(store, index_of(store.directory, tmp_path))
    assert reader.index.dtype == getattr(torch, dtype)
    for document in range(len(LENGTHS)):
        found = reader.sample(document)
        assert torch.equal(found.input_ids, content.ids[document])
        assert torch.equal(found.loss_mask, content.masks[document])
        assert torch.equal(found.aux_hidden, content.aux[document])
        assert torch.equal(found.last_hidden, content.last[document])
        part = reader.sample(document, 1, 2)
        assert torch.equal(part.aux_hidden, content.aux[document][1:2])


def test_index_tells_what_was_written(written: Path, tmp_path: Path) -> None:
    expected, found = Content().documents, index_of(written, tmp_path)
    assert found.lengths.tolist() == list(LENGTHS)
    assert np.array_equal(found.sample_hash, expected.sample_hash)
    assert np.array_equal(found.prompt_hash, expected.prompt_hash)
    assert np.array_equal(found.runs.bounds, expected.runs.bounds)
    assert [found.sources[i] for i in found.source] == ["code", "chat"] * 3
    assert found.fingerprint == read_manifest(written).fingerprint


def test_any_safetensors_reader_reads_a_shard(written: Path) -> None:
    content = Content()
    with safe_open(written / "shard-00000.safetensors", "pt") as shard:
        found = {name: shard.get_tensor(name) for name in TENSORS}
    assert torch.equal(found["aux_hidden"], torch.cat(content.aux[:2]))
    assert torch.equal(found["last_hidden"], torch.cat(content.last[:2]))
    assert torch.equal(found["input_ids"], torch.cat(content.ids[:2]))
    assert torch.equal(found["loss_mask"], torch.cat(content.masks[:2]).to(torch.uint8))
    head = (written / "shard-00000.safetensors").read_bytes()[:8]
    assert (8 + int.from_bytes(head, "little")) % 4096 == 0


@pytest.mark.parametrize("max_samples", [None, 1, 4, 100])
def test_stored_index_is_the_probed_one(written: Path, max_samples: int | None) -> None:
    store = NativeStore(written, LAYOUT)
    records = [record for file in store.files for record in store.probe(file)]
    probed, stored = index_records(records[:max_samples]), store.stored_index(max_samples)
    for field in fields(DocumentIndex):
        ours, theirs = getattr(stored, field.name), getattr(probed, field.name)
        if isinstance(ours, np.ndarray):
            assert np.array_equal(ours, theirs), field.name
    assert stored.files[: len(probed.files)] == probed.files
    assert np.array_equal(stored.runs.offsets, probed.runs.offsets)
    assert np.array_equal(stored.runs.bounds, probed.runs.bounds)
    assert stored.dtype == probed.dtype


def test_no_shard_is_opened_for_the_index(native: Path, tmp_path: Path) -> None:
    for shard in native.glob("*.safetensors"):
        size = shard.stat().st_size
        shard.write_bytes(b"")
        os.truncate(shard, size)
    assert len(index_of(native, tmp_path)) == len(LENGTHS)
    assert not (tmp_path / "cache").exists()


def test_the_manifest_declares(written: Path) -> None:
    store = open_store(written, LAYOUT)
    resolved = resolve_declaration(Declaration(), store.declaration(), 2, written)
    assert (resolved.aux_layer_ids, resolved.last_hidden) == ((1, 4), LastHidden.pre_norm)
    assert set(resolved.declared_by.values()) == {"manifest.json"}
    other = Declaration(last_hidden=LastHidden.post_norm)
    with pytest.raises(DataError, match=r"against pre_norm in manifest\.json"):
        resolve_declaration(other, store.declaration(), 2, written)
    assert read_layout(written) == LAYOUT
    assert read_manifest(written).verifier == VerifierFacts("toy", "0a1b", None, "fp8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_aux_layers": 3}, r"hidden_states\.num_aux_layers': found 2, expected 3"),
        ({"hidden_size": 4}, r"verifier\.hidden_size': found 3, expected 4"),
        ({"vocab_size": 51}, r"verifier\.vocab_size': found 50, expected 51"),
    ],
)
def test_other_sizes_are_refused(written: Path, change: dict[str, int], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        open_store(written, replace(LAYOUT, **change))


def edit(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest as a person would, who removes its checksum."""
    path = directory / "manifest.json"
    content = json.loads(path.read_text())
    del content["blake2b"]
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format_version=99), "'format_version': found 99, expected 1"),
        (lambda m: m.update(format="other"), "'format': found 'other', expected 'eagle3'"),
        (lambda m: m["verifier"].pop("hidden_size"), r"'verifier\.hidden_size': found None"),
        (lambda m: m["hidden_states"].update(dtype="int8"), "found 'int8', expected one of"),
        (lambda m: m["hidden_states"].update(aux_layer_ids=[4, 1]), "ascending order"),
        (lambda m: m["hidden_states"].update(layer_id_convention="after"), "expected one of ent"),
        (lambda m: m.update(num_samples=7), "'num_samples': found 7, expected 6"),
        (lambda m: m["shards"][1].update(bytes=1), r"'shards\[1\]\.bytes': found 1, expected"),
        (lambda m: m["shards"][0].update(file="../x"), "expected a plain file name"),
        (lambda m: m["shards"].append(3), r"'shards\[3\]': found 3, expected an object"),
        (lambda m: m.update(fingerprint="0"), "fingerprint: found"),
    ],
    ids=[
        "version",
        "format",
        "missing key",
        "dtype",
        "layer order",
        "convention",
        "samples",
        "size",
        "place",
        "kind",
        "fingerprint",
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(
    native: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    edit(native, change)
    with pytest.raises(DataError, match=message):
        index_of(native, tmp_path)


def test_an_edit_on_purpose_is_possible_and_an_accident_is_not(
    native: Path, tmp_path: Path
) -> None:
    path = native / "manifest.json"
    path.write_text(path.read_text().replace('"toy"', '"toi"'))
    with pytest.raises(DataError, match="damaged, or was edited by hand"):
        open_store(native, LAYOUT)
    edit(native, lambda content: None)
    assert len(index_of(native, tmp_path)) == len(LENGTHS)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_flipped_bit_of_the_manifest_is_refused(
    written: Path, tmp_path: Path, data: st.DataObject
) -> None:
    content = bytearray((written / "manifest.json").read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    damaged = tmp_path / "damaged"
    damaged.mkdir(exist_ok=True)
    (damaged / "manifest.json").write_bytes(content)
    found = None
    with suppress(DataError):
        found = read_manifest(damaged)
    # A blank that became another one, or the name of the checksum's key, says nothing else.
    assert found in (None, read_manifest(written))


def test_an_index_of_another_directory_is_refused(native: Path, tmp_path: Path) -> None:
    other = Content((5, 6)).write(tmp_path / "other")
    (native / "index.npz").write_bytes((other / "index.npz").read_bytes())
    with pytest.raises(DataError, match=r"index\.npz: .* belongs to another directory"):
        index_of(native, tmp_path)


def test_missing_and_cut_files_are_named(native: Path, tmp_path: Path) -> None:
    shard = native / "shard-00001.safetensors"
    os.truncate(shard, 4200)
    with pytest.raises(DataError, match=r"shard-00001\.safetensors: found 4,200 bytes, expected"):
        index_of(native, tmp_path)
    shard.unlink()
    with pytest.raises(DataError, match=r"shard-00001.*expected a shard of 1 samples"):
        index_of(native, tmp_path)
    (native / "index.npz").unlink()
    with pytest.raises(DataError, match=r"index\.npz: cannot be read"):
        NativeStore(native, LAYOUT).probe("shard-00000.safetensors")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", ["manifest.json", "index.npz"])
def test_permission_denied_is_named(native: Path, tmp_path: Path, name: str) -> None:
    (native / name).chmod(0)
    with pytest.raises(DataError, match=rf"{name}: cannot be read .*Permission denied"):
        index_of(native, tmp_path)


def test_two_formats_in_one_directory_are_refused(native: Path) -> None:
    torch.save({}, native / "data_0.pt")
    with pytest.raises(DataError, match=r"native \(manifest\.json\) and speculators v1"):
        open_store(native, LAYOUT)


def test_an_unfinished_directory_is_not_read(tmp_path: Path) -> None:
    content = Content()
    with content.writer(tmp_path / "states") as writer:
        content.write_shards(writer)
    assert not has_documents(tmp_path / "states")
    with pytest.raises(DataError, match="still being written, or whose writing was interrupted"):
        open_store(tmp_path / "states", LAYOUT)


def test_training_batches_are_those_of_the_source(
    shards: Path, tmp_path: Path, build: Callable[..., ShardDataModule]
) -> None:
    run(shards, tmp_path / "native")
    theirs, ours = build(shards), build(tmp_path / "native")
    for found, expected in zip(packs(ours), packs(theirs), strict=True):
        for field in fields(PackedBatch):
            pair = [getattr(pack, field.name) for pack in (found, expected)]
            is_tensor = isinstance(pair[0], Tensor)
            assert torch.equal(*pair) if is_tensor else pair[0] == pair[1], field.name
    assert ours.description.fingerprint == theirs.description.fingerprint


def packs(data: ShardDataModule) -> list[PackedBatch]:
    """Of training and validation."""
    data.setup()
    loaders = (data.train_dataloader(), data.val_dataloader())
    return [pack for loader in loaders for window in loader for pack in window.packs]
