"""Conversion to the native format: the same training, whatever happens on the way."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from eagle3 import shards
from eagle3.convert import RECORD_NAME
from eagle3.data import disk
from eagle3.data.bad_samples import BadSamples
from eagle3.data.corpus import Corpus
from eagle3.data.formats import open_store
from eagle3.data.index import build_index, validation_documents
from eagle3.data.native import NativeStore, is_native
from eagle3.data.reading import StateReader
from eagle3.data.shards import open_shards
from eagle3.errors import DataError
from eagle3.names import LastHidden, TrainOn
from eagle3.shards_commands.convert import num_bytes
from tests.converting import (
    DECLARED,
    LAYOUT,
    LENGTHS,
    contents,
    run,
    run_into,
    tree,
    write_capture,
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_capture(tmp_path / "capture")


def corpus(directory: Path) -> Corpus:
    shards = open_shards(
        directory,
        LAYOUT,
        DECLARED,
        train_on=TrainOn.assistant,
        max_samples=None,
        cache=directory.parent / "cache",
        bad_samples=BadSamples(0),
        num_workers=1,
    )
    return Corpus.join([shards])


def test_documents_are_those_of_the_source(source: Path, tmp_path: Path) -> None:
    before = tree(source)
    summary = run(source, tmp_path / "native")
    assert tree(source) == before
    ours, theirs = corpus(tmp_path / "native"), corpus(source)
    assert ours.fingerprint == theirs.fingerprint == summary.fingerprint
    assert np.array_equal(ours.runs.bounds, theirs.runs.bounds)
    assert [ours.label(d) for d in range(len(LENGTHS))] == ["capture"] * len(LENGTHS)
    validating = [validation_documents(c.prompt_hash, 0.3).tolist() for c in (ours, theirs)]
    assert validating[0] == validating[1]
    for document in range(len(LENGTHS)):
        found, expected = (c.parts[0].reader.sample(document) for c in (ours, theirs))
        for name in ("input_ids", "loss_mask", "aux_hidden", "last_hidden"):
            assert torch.equal(getattr(found, name), getattr(expected, name))


# The first bytes, the middle of the second shard, of the third and of the last. Then a shard that
# is not synced, renamed but not noted, noted; all shards, the record, the index; the manifest, not
# renamed and renamed.
DEATHS = [
    *(("pwrite", call) for call in (2, 17, 25, 38)),
    *(("fsync", call) for call in (2, 3, 4, 13, 14, 16, 18, 19)),
]
LIMITS = [("RLIMIT_FSIZE", limit) for limit in (100, 4096, 5000)]


@dataclass(frozen=True)
class Troubles:
    """Conversions of one capture, one complete and the others interrupted."""

    source: Path
    whole: Path
    ends: dict[tuple[str, int], tuple[Path, int, str]]
    """Directory, exit status and last words by the trouble."""

    def copy(self, trouble: tuple[str, int], out: Path) -> Path:
        """What a trouble left, to go on with."""
        return shutil.copytree(self.ends[trouble][0], out)


@pytest.fixture(scope="module")
def troubles(tmp_path_factory: pytest.TempPathFactory) -> Troubles:
    root = tmp_path_factory.mktemp("troubles")
    source = write_capture(root / "capture")
    run(source, root / "whole")
    directories = {root / f"{name}-{number}": (name, number) for name, number in DEATHS + LIMITS}
    ends = run_into(directories, source)
    return Troubles(
        source, root / "whole", {directories[out]: (out, *end) for out, end in ends.items()}
    )


@pytest.mark.parametrize("death", DEATHS, ids=[f"{number}. {call}" for call, number in DEATHS])
def test_killed_and_started_again_gives_the_same_bytes(
    troubles: Troubles, tmp_path: Path, death: tuple[str, int]
) -> None:
    directory, status, _ = troubles.ends[death]
    assert status == -signal.SIGKILL
    assert is_native(directory) == (death == ("fsync", 19))
    again = run(troubles.source, troubles.copy(death, tmp_path / "native"))
    assert contents(tmp_path / "native") == contents(troubles.whole)
    assert again.num_samples == len(LENGTHS)
    if death[1] >= 13:
        assert again.num_kept >= 3


def test_finished_work_is_not_done_again(
    troubles: Troubles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = troubles.copy(("pwrite", 38), tmp_path / "native")
    read = []
    really = StateReader.read
    monkeypatch.setattr(
        StateReader, "read", lambda self, d, targets: read.append(d) or really(self, d, targets)
    )
    summary = run(troubles.source, out)
    assert len(set(read)) == len(LENGTHS) - summary.num_kept <= 2
    done = tree(out)
    assert run(troubles.source, out).num_kept == len(LENGTHS)
    assert tree(out) == done


@pytest.mark.parametrize("limit", LIMITS, ids=[str(limit) for _, limit in LIMITS])
def test_a_full_disk_is_told_and_the_work_goes_on(
    troubles: Troubles, tmp_path: Path, limit: tuple[str, int]
) -> None:
    _, status, error = troubles.ends[limit]
    assert status == 1
    assert "disk is full" in error
    assert "start the same command again" in error
    out = troubles.copy(limit, tmp_path / "native")
    run(troubles.source, out)
    assert contents(out) == contents(troubles.whole)


def spoil(source: Path, numbers: Sequence[int]) -> None:
    """NaN among the states of some documents."""
    for number in numbers:
        path = source / f"data_{number}.pt"
        content = torch.load(path, weights_only=True)
        content["hidden_states"][1][1, 2] = float("nan")
        torch.save(content, path)


def test_bad_samples_are_left_out_and_listed(source: Path, tmp_path: Path) -> None:
    good = tmp_path / "good" / "capture"
    write_capture(good)
    for number in (0, 3, 4):
        (good / f"data_{number}.pt").unlink()
    spoil(source, (0, 4))
    (source / "data_3.pt").write_bytes(b"PK")
    summary = run(source, tmp_path / "native", max_bad_samples=3)
    assert summary.num_samples == len(LENGTHS) - 3
    assert [name in line for name, line in zip("304", summary.skipped, strict=True)] == [True] * 3
    assert json.loads((tmp_path / "native" / RECORD_NAME).read_text())["skipped"] == list(
        summary.skipped
    )
    expected, found = corpus(good), corpus(tmp_path / "native")
    assert found.fingerprint == expected.fingerprint
    for document in range(len(LENGTHS) - 3):
        ours, theirs = (c.parts[0].reader.sample(document) for c in (found, expected))
        assert torch.equal(ours.aux_hidden, theirs.aux_hidden)


def test_too_many_bad_samples_stop_with_the_list(source: Path, tmp_path: Path) -> None:
    spoil(source, (2, 5))
    with pytest.raises(DataError, match=r"2 bad samples, --max-bad-samples allows 1") as caught:
        run(source, tmp_path / "native", max_bad_samples=1)
    assert "data_2.pt" in str(caught.value)
    assert "data_5.pt" in str(caught.value)
    assert not (tmp_path / "native" / "manifest.json").exists()
    # The limit is remembered over a restart, and the work is too.
    with pytest.raises(DataError, match="allows 1"):
        run(source, tmp_path / "native", max_bad_samples=1)
    assert run(source, tmp_path / "native", max_bad_samples=2).num_samples == len(LENGTHS) - 2


def test_labels_are_kept(source: Path, tmp_path: Path) -> None:
    rows = [f"data_{n}.pt,{'code' if n % 2 else 'chat'}" for n in range(len(LENGTHS) - 1)]
    (source / "sources.csv").write_text("\n".join(["sample_id,source", *rows]) + "\n")
    run(source, tmp_path / "native")
    ours, theirs = corpus(tmp_path / "native"), corpus(source)
    labels = [[c.label(d) for d in range(len(LENGTHS))] for c in (ours, theirs)]
    assert labels[0] == labels[1]
    assert set(labels[0]) == {"code", "chat", "capture"}


def test_a_native_directory_gets_other_shards(source: Path, tmp_path: Path) -> None:
    first = run(source, tmp_path / "native")
    second = run(tmp_path / "native", tmp_path / "again", shard_bytes=10**9)
    assert second.fingerprint == first.fingerprint
    assert len(NativeStore(tmp_path / "again", LAYOUT).files) == 1
    third = run(tmp_path / "again", tmp_path / "third")
    assert third.num_bytes == first.num_bytes
    names = [path.name for path in (tmp_path / "native").glob("*.safetensors")]
    assert len(names) == 4
    for name in [*names, "index.npz", "manifest.json"]:
        pair = [(tmp_path / place / name).read_bytes() for place in ("native", "third")]
        assert pair[0] == pair[1]


def test_other_jobs_are_not_mixed(troubles: Troubles, tmp_path: Path) -> None:
    out = troubles.copy(("pwrite", 25), tmp_path / "native")
    other = write_capture(tmp_path / "other", (4, 5, 6))
    with pytest.raises(DataError, match="found the beginning of another job"):
        run(other, out)
    post_norm = replace(DECLARED, last_hidden=LastHidden.post_norm)
    with pytest.raises(DataError, match="found the beginning of another job"):
        run(troubles.source, out, declaration=post_norm)
    run(troubles.source, out)
    with pytest.raises(DataError, match="complete native directory of another conversion"):
        run(other, out)
    assert corpus(out).fingerprint == corpus(troubles.source).fingerprint


def test_the_source_is_never_written_to(source: Path) -> None:
    for out in (source, source / "native"):
        with pytest.raises(DataError, match="found a place inside the source"):
            run(source, out, cache=source.parent / "cache")


def test_the_verifier_is_recorded(source: Path, tmp_path: Path) -> None:
    verifier = tmp_path / "verifier"
    verifier.mkdir()
    config = {"text_config": {"quantization_config": {"quant_method": "fp8"}}}
    (verifier / "config.json").write_text(json.dumps(config))
    (verifier / "chat_template.jinja").write_text("{{ messages }}")
    run(source, tmp_path / "native", verifier=verifier)
    facts = NativeStore(tmp_path / "native", LAYOUT).manifest.verifier
    assert (facts.name, facts.quantization) == ("verifier", "fp8")
    assert facts.chat_template_fingerprint is not None
    assert facts.tokenizer_fingerprint is None
    run(tmp_path / "native", tmp_path / "again")
    assert NativeStore(tmp_path / "again", LAYOUT).manifest.verifier == facts


def test_only_the_first_samples(source: Path, tmp_path: Path) -> None:
    assert run(source, tmp_path / "native", max_samples=4).num_samples == 4
    store = open_store(tmp_path / "native", LAYOUT)
    index = build_index(store, tmp_path / "cache", BadSamples(0), 1)
    assert index.lengths.tolist() == list(LENGTHS[:4])


def test_short_samples_are_counted_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of one token and of none, also when the work had been done before."""
    source, out = write_capture(tmp_path / "capture", (1, 9, 0, 5, 1)), tmp_path / "native"
    for _ in range(2):
        summary = run(source, out)
        assert (summary.num_samples, summary.too_short, summary.skipped) == (2, 3, ())
    assert json.loads((out / RECORD_NAME).read_text())["too_short"] == 3
    facts = ["--aux-layer-ids", "2,15,27", "--layer-id-convention", "entering"]
    facts += ["--last-hidden", "pre_norm", "--vocab-size", "50", "--cache", str(tmp_path / "cache")]
    assert shards.main(["convert", str(source), str(tmp_path / "again"), *facts]) == 0
    assert "left out: 0 unusable, 3 of less than two tokens" in capsys.readouterr().out


def test_a_disk_that_is_too_small_leaves_the_directory_free(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was written, so a conversion with other shards may begin there."""
    monkeypatch.setattr(disk, "free_bytes", lambda path: 100)
    with pytest.raises(DataError, match="will be written, but only 100 bytes are free"):
        run(source, tmp_path / "native")
    assert not (tmp_path / "native").exists()
    monkeypatch.undo()
    assert run(source, tmp_path / "native", shard_bytes=700).num_samples == len(LENGTHS)


def test_command_line(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = ["--aux-layer-ids", "2,15,27", "--layer-id-convention", "entering"]
    facts += ["--last-hidden", "pre_norm", "--vocab-size", "50", "--cache", str(tmp_path / "cache")]
    spoil(source, (2,))
    command = ["convert", str(source), str(tmp_path / "native"), *facts, "--shard-bytes", "1.4kB"]
    assert shards.main(command) == 2
    assert "1 bad samples, --max-bad-samples allows 0" in capsys.readouterr().err
    assert shards.main([*command, "--max-bad-samples", "1"]) == 0
    printed = capsys.readouterr().out
    assert "9 samples, 92 tokens" in printed
    assert "left out: 1 unusable, 0 of less than two tokens" in printed
    assert corpus(tmp_path / "native").layout == LAYOUT


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2GB", 2 * 10**9), ("500 MB", 5 * 10**8), ("1.5GiB", 3 << 29), ("4096", 4096)],
)
def test_sizes_are_read_as_people_write_them(text: str, expected: int) -> None:
    assert num_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "0", "two", "-1GB", "1XB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected a size such as"):
        num_bytes(text)
