"""Figures of the audit against sums done by hand, and that nothing is written where data lie."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from eagle3.data.formats import open_store
from eagle3.data.index import DocumentIndex, index_records
from eagle3.data.layout import StateLayout
from eagle3.data.store import DocumentRecord
from eagle3.data.vocab import VocabMap
from eagle3.data.vocab_files import save_vocab_map
from eagle3.errors import ConfigError, DataError
from eagle3.inspection import states as states_module
from eagle3.inspection.contents import content_facts
from eagle3.inspection.stated import GivenFacts, find_sizes
from eagle3.inspection.states import read_states, spread
from eagle3.names import TrainOn
from tests.inspection.conftest import Look
from tests.inspection.planted import AUX_IDS, HIDDEN, LENS, VOCAB, capture, save

NO_LABELS = (("",), np.zeros(0, np.int64))


def make_index(documents: list[tuple[int, int]]) -> DocumentIndex:
    """Documents given as (tokens, supervised tokens at the end)."""
    records = [
        DocumentRecord(
            file=f"data_{k}.pt",
            length=tokens,
            runs=np.array([[tokens - learned, tokens]] if learned else [], np.int64).reshape(-1, 2),
            sample_hash=k,
            prompt_hash=k // 2,
            dtype="bfloat16",
            ids_offset=0,
            ids_bytes=8,
            state_offsets=(0,),
        )
        for k, (tokens, learned) in enumerate(documents)
    ]
    return index_records(records)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.integers(2, 70_000).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))),
        min_size=1,
        max_size=30,
    )
)
def test_contents_add_up(documents: list[tuple[int, int]]) -> None:
    index = make_index(documents)
    labels = (("a", "b"), np.arange(len(index)) % 2)
    found = content_facts(index, labels, TrainOn.assistant, 0.3)
    lengths = [tokens for tokens, _ in documents]
    bins = found.lengths.histogram
    assert sum(one.documents for one in bins) == len(documents)
    assert sum(one.tokens for one in bins) == sum(lengths) == found.tokens
    for one in bins:
        assert one.documents == sum(one.low <= length < one.high for length in lengths)
    assert bins[0].documents
    assert bins[-1].documents
    assert all(a.high == b.low for a, b in itertools.pairwise(bins))
    assert found.supervision.tokens == sum(learned for _, learned in documents)
    assert sum(found.supervision.share_histogram) == len(documents)
    assert sum(source.documents for source in found.sources) == len(documents)
    assert sum(source.tokens for source in found.sources) == found.tokens
    assert found.duplicates.sibling_documents == len(documents) // 2 * 2
    assert found.duplicates.prompts == -(-len(documents) // 2)
    assert 0 <= found.validation.documents <= len(documents)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 500), st.integers(1, 100))
def test_spread_takes_both_ends_and_nothing_twice(count: int, wanted: int) -> None:
    places = spread(count, wanted)
    assert len(places) == min(count, wanted)
    assert len(np.unique(places)) == len(places)
    if count and wanted > 1:
        assert places[0] == 0
        assert places[-1] == count - 1


def test_figures_by_hand(look: Look, shards: Path) -> None:
    audit = look(shards, tokens_per_s=1e6)
    documents = capture()
    tokens = sum(len(d["input_ids"]) for d in documents)
    gated = sum(int(d["loss_mask"][1:].sum()) for d in documents)
    rows = tokens - len(documents)
    assert audit.contents.tokens == tokens
    assert audit.directory.bytes_per_token == 4 * HIDDEN * 2
    assert audit.directory.disk_bytes == sum(p.stat().st_size for p in shards.glob("*.pt"))
    reading = audit.reading
    assert reading.rows == rows
    assert reading.epoch_bytes_with_all_last == rows * 4 * HIDDEN * 2
    assert reading.epoch_bytes == rows * 3 * HIDDEN * 2 + gated * HIDDEN * 2
    assert reading.gb_per_s == pytest.approx(reading.epoch_bytes / rows * 1e6 / 1e9)
    assert audit.states.tokens == tokens
    assert audit.states.read_bytes == tokens * 4 * HIDDEN * 2


def test_states_are_summed_up_layer_by_layer(look: Look) -> None:
    documents = capture()
    for document in documents:
        document["hidden_states"][1][0] *= 1000
    documents[0]["hidden_states"][2][3:5, 1] = float("nan")
    found = look(documents).states
    assert [layer.name for layer in found.layers] == [*(f"entering {k}" for k in AUX_IDS), "last"]
    assert [layer.bad_rows for layer in found.layers] == [0, 0, 2, 0]
    middle = torch.cat([d["hidden_states"][1][1:].bfloat16().float() for d in documents])
    rms = middle.square().mean(dim=-1).sqrt().numpy()
    assert found.layers[1].rms_median == pytest.approx(np.median(rms), rel=1e-5)
    assert found.layers[1].rms_p99 == pytest.approx(np.quantile(rms, 0.99), rel=1e-5)
    assert found.layers[1].rms_first_token > 1000
    assert len(found.pairs) == 6


def test_rates_are_those_that_were_planted(look: Look, shards: Path) -> None:
    found = look(shards).agreement
    assert found is not None
    assert found.on_policy > 0.99
    assert found.lens == pytest.approx([s + (1 - s) / VOCAB for s in LENS], abs=0.08)
    # the token before the first supervised one is judged, the last one has no successor
    assert found.rows == sum(int(d["loss_mask"][1:].sum()) for d in capture())


def test_chunks_do_not_change_a_figure(
    look: Look, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = look(shards)
    monkeypatch.setattr(states_module, "_CHUNK_VALUES", 7 * 4 * HIDDEN)
    assert look(shards) == whole


def test_states_are_read_as_stored(shards: Path, tmp_path: Path) -> None:
    from eagle3.data.bad_samples import BadSamples
    from eagle3.data.index import build_index

    store = open_store(shards, StateLayout(3, HIDDEN, VOCAB))
    index = build_index(store, tmp_path / "cache", BadSamples(0), 1)
    expected = torch.stack(torch.load(shards / "data_3.pt")["hidden_states"], dim=1)
    assert torch.equal(read_states(store, index, 3, 5, 40), expected[5:40])


def test_sampling_reads_a_few_and_counts_all(look: Look, shards: Path) -> None:
    audit = look(shards, samples=3, shown=2)
    assert audit.states.documents == 3
    assert audit.contents.documents == 12
    assert [shown.name.split()[0] for shown in audit.shown] == ["data_0.pt", "data_11.pt"]


def test_siblings_and_sources_are_counted(look: Look) -> None:
    documents = capture()
    documents[1]["input_ids"][:20] = documents[0]["input_ids"][:20]
    documents[1]["loss_mask"] = (torch.arange(61) >= 20).long()
    audit = look(documents)
    assert audit.contents.duplicates.prompts_with_siblings == 1
    assert audit.contents.duplicates.sibling_documents == 2
    (source,) = audit.contents.sources
    assert source.documents == 12
    assert source.supervised_tokens == audit.contents.supervision.tokens


def test_source_labels_come_from_a_csv(look: Look, shards: Path, tmp_path: Path) -> None:
    labels = tmp_path / "labels.csv"
    labels.write_text("sample_id,source\ndata_0,math\ndata_1.pt,code\n")
    audit = look(shards, source_labels=labels)
    assert {s.name: s.documents for s in audit.contents.sources} == {
        "math": 1,
        "code": 1,
        "shards": 10,
    }


def tree(directory: Path) -> dict[str, Any]:
    return {
        str(path.relative_to(directory)): (
            path.stat().st_mtime_ns,
            hashlib.blake2b(path.read_bytes()).hexdigest() if path.is_file() else None,
        )
        for path in [directory, *directory.rglob("*")]
    }


def test_nothing_is_written_into_the_directory(look: Look, shards: Path) -> None:
    before = tree(shards)
    look(shards)
    assert tree(shards) == before
    with pytest.raises(DataError, match="inside the data directory"):
        look(shards, cache=shards / "cache")
    assert tree(shards) == before


@pytest.mark.parametrize("option", ["samples", "num_workers", "ttt_steps"])
def test_counts_below_one_are_refused(look: Look, shards: Path, option: str) -> None:
    with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')}: found 0"):
        look(shards, **{option: 0})


def test_sizes_come_from_whoever_says_them(shards: Path, verifier: Path, tmp_path: Path) -> None:
    said = find_sizes(shards, GivenFacts(vocab_size=50), verifier)
    assert said.layout == StateLayout(3, HIDDEN, 50)
    assert said.said_by == {
        "vocab_size": "command line",
        "hidden_size": "verifier's config.json",
        "num_aux_layers": "data_0.pt",
    }
    assert find_sizes(shards, GivenFacts(), None).said_by["vocab_size"] == "data_config.json"
    bare = save(tmp_path / "bare", capture(2))
    measured = find_sizes(bare, GivenFacts(), None)
    assert measured.said_by == {"num_aux_layers": "data_0.pt", "hidden_size": "data_0.pt"}
    assert measured.vocab_size is None
    with pytest.raises(ConfigError, match="--verifier DIR or --vocab-size N"):
        measured.with_vocab()


def test_the_first_readable_file_is_measured(tmp_path: Path) -> None:
    bare = save(tmp_path / "bare", capture(3))
    (bare / "data_0.pt").write_bytes(b"cut")
    assert find_sizes(bare, GivenFacts(), None).said_by["hidden_size"] == "data_1.pt"


def test_directories_that_say_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="found no such directory"):
        find_sizes(tmp_path / "missing", GivenFacts(), None)
    with pytest.raises(DataError, match=r"found an empty directory, expected manifest\.json"):
        find_sizes(tmp_path, GivenFacts(), None)


def misplaced(directory: Path, kind: str) -> None:
    """Files that say nothing about sizes."""
    native = directory / "shard-00000.safetensors"
    if kind == "unfinished":
        (directory / ".writing").mkdir()
        native.touch()
    elif kind == "no manifest":
        native.touch()
    elif kind == "prepared":
        (directory / "hidden_states").mkdir()
        (directory / "hidden_states" / "hs_0.safetensors").touch()
    elif kind == "cut":
        (directory / "data_3.pt").write_bytes(b"PK\x03\x04")
    elif kind == "stacked":
        torch.save({"hidden_states": torch.ones(4, 3, 2)}, directory / "data_0.pt")
    elif kind == "other keys":
        torch.save({"hidden_state": torch.ones(3), "target": 1}, directory / "data_0.pt")
    else:
        save_file({"hidden_states": torch.ones(3, 4)}, directory / "hs_0.safetensors")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("unfinished", r"still being written, or whose writing was interrupted"),
        ("no manifest", r"native directory without manifest\.json"),
        ("prepared", r"found the prepared data of speculators.*hidden_states\.$"),
        ("cut", r"none of the first 1 of 1 files.*data_3\.pt: found a torch\.save file of 4 bytes"),
        ("stacked", r"data_0\.pt: found hidden_states \[4, 3, 2\], stacked, .*tensor\.unbind"),
        ("other keys", r"data_0\.pt: found keys hidden_state, target, expected hidden_states as a"),
        ("flat", r"hs_0\.safetensors: found hidden_states \[3, 4\], expected .*\[n, layers, H\]"),
    ],
)
def test_why_nothing_says_the_sizes_is_told(tmp_path: Path, kind: str, expected: str) -> None:
    misplaced(tmp_path, kind)
    with pytest.raises(DataError, match=expected) as caught:
        find_sizes(tmp_path, GivenFacts(), None)
    if "none of the first" in str(caught.value):
        assert str(caught.value).endswith("give --num-aux-layers and --hidden-size.")


def test_unknown_vocabulary_is_said(look: Look) -> None:
    audit = look(capture(), config=None, verifier=None)
    assert audit.directory.vocab_size is None
    assert "vocab_size" not in audit.directory.said_by


def keys(value: Any) -> Any:
    """Names without values; of a list, those of its first member."""
    if isinstance(value, dict):
        return {name: keys(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple) and value and isinstance(value[0], dict):
        return [keys(value[0])]
    return None


def test_json_keys_are_those_that_readers_know(look: Look, tmp_path: Path) -> None:
    """Names may be added; one that is gone or renamed needs another ``json_version``."""
    vocab_map = tmp_path / "map.safetensors"
    save_vocab_map(vocab_map, VocabMap.identity(VOCAB))
    found = look(capture(), vocab_map=vocab_map).as_dict()
    known = json.loads((Path(__file__).parent / "json_keys.json").read_text())
    assert keys(found) == known
    assert json.loads(json.dumps(found))["directory"]["aux_layer_ids"] == AUX_IDS
