"""``shards vocab``: coverage, maps, and an old map beside a new one."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3 import vocab_coverage, vocab_report
from eagle3.data.tokenizer_fingerprint import tokenizer_fingerprint
from eagle3.data.vocab import VocabMap
from eagle3.data.vocab_files import load_vocab_map, read_origin, save_vocab_map
from eagle3.errors import ConfigError, DataError

GOLDEN = Path(__file__).parent / "golden" / "vocab_mapping"
CASES = json.loads(GOLDEN.with_suffix(".json").read_text())["cases"]
VOCAB = 30
ANSWERS = [7] * 8 + [5] * 4 + [9] * 4 + [20] * 3 + [11]
"""Tokens of the responses; special tokens are 28 (never seen) and 29 (the end of a turn)."""


def write_document(
    path: Path, prompt: Sequence[int], answer: Sequence[int], hidden_size: int = 4
) -> None:
    """A capture of speculators v1 whose states nobody may read: they are NaN."""
    path.parent.mkdir(parents=True, exist_ok=True)
    length = len(prompt) + len(answer)
    sample = {
        "input_ids": torch.tensor([*prompt, *answer]),
        "loss_mask": torch.tensor([0] * len(prompt) + [1] * len(answer)),
        "hidden_states": [torch.full((length, hidden_size), torch.nan) for _ in range(4)],
    }
    torch.save(sample, path)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Five documents; their prompts are full of token 3."""
    for i in range(5):
        write_document(tmp_path / "shards" / f"data_{i}.pt", [3] * (i + 2), ANSWERS[i::5])
    return tmp_path / "shards"


@pytest.fixture
def verifier(tmp_path: Path) -> Path:
    directory = tmp_path / "verifier"
    directory.mkdir()
    sizes = {"hidden_size": 4, "vocab_size": VOCAB, "num_hidden_layers": 8, "rms_norm_eps": 1e-6}
    (directory / "config.json").write_text(json.dumps(sizes | {"eos_token_id": 29}))
    vocabulary = {f"t{i}": i for i in range(28)}
    added = [{"content": "<think>", "id": 28}, {"content": "<|end|>", "id": 29}]
    added.append({"content": "<unused>", "id": 31})
    content = {"model": {"vocab": vocabulary}, "added_tokens": added}
    (directory / "tokenizer.json").write_text(json.dumps(content))
    return directory


def run(*arguments: object) -> int:
    """The sub-command in this process."""
    parser = argparse.ArgumentParser()
    vocab_report.add_arguments(parser)
    return vocab_report.run(parser.parse_args([str(a) for a in arguments]))


@pytest.fixture
def options(tmp_path: Path) -> list[object]:
    return ["--cache", tmp_path / "cache", "--num-workers", 2]


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"zipf"}))
def test_maps_of_counted_responses_are_the_goldens(
    name: str, tmp_path: Path, options: list[object]
) -> None:
    """Responses that hold every token as often as the golden's corpus (zipf: 14 M tokens)."""
    stored, case = load_file(GOLDEN.with_suffix(".safetensors")), CASES[name]
    ids = stored[f"{name}.tokens"].repeat_interleave(stored[f"{name}.counts"]).tolist()
    write_document(tmp_path / "shards" / "data_0.pt", [1, 1], ids[::2])
    write_document(tmp_path / "shards" / "data_1.pt", [1, 1], ids[1::2])
    draft, verifier = case["draft_vocab_size"], case["target_vocab_size"]
    out = tmp_path / "map.safetensors"
    wanted = ["--write", draft, "--out", out, "--vocab-size", verifier]
    assert run(tmp_path / "shards", *wanted, *options) == 0
    vocab_map = load_vocab_map(out, draft, verifier)
    assert torch.equal(vocab_map.d2t, stored[f"{name}.d2t"])
    assert torch.equal(vocab_map.t2d, stored[f"{name}.t2d"])


def test_coverage_by_hand(
    shards: Path, tmp_path: Path, options: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    """20 response tokens: 8 + 4 + 4 + 3 + 1."""
    report = tmp_path / "report.json"
    wanted = ["--sizes", "4,1,2,500", "--vocab-size", VOCAB, "--json", report]
    assert run(shards, *wanted, *options) == 0
    found = json.loads(report.read_text())
    assert [found[key] for key in ("tokens", "documents", "distinct_tokens")] == [20, 5, 5]
    assert [size["size"] for size in found["sizes"]] == [1, 2, 4, VOCAB]
    assert [size["coverage"] for size in found["sizes"]] == pytest.approx([0.4, 0.6, 0.95, 1.0])
    assert [size["outside_tokens"] for size in found["sizes"]] == [12, 8, 1, 0]
    assert [size["gain"] for size in found["sizes"]] == pytest.approx([0.0, 0.2, 0.35, 0.05])
    out = capsys.readouterr().out
    assert "20 response tokens (train_on=assistant) in 5 documents of 1 directory" in out
    assert "always kept: 0 tokens" in out
    table = [line.split() for line in out.splitlines() if line.strip().startswith(("1 ", "4 "))]
    assert table == [
        ["1", "40.000%", "12"],
        ["4", "95.000%", "1", "+35.000%", "+17500.0000%"],
    ]


def test_the_size_of_the_vocabulary_is_the_identity(
    shards: Path, tmp_path: Path, options: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "map.safetensors"
    assert run(shards, "--write", VOCAB, "--out", out, "--vocab-size", VOCAB, *options) == 0
    assert load_vocab_map(out, VOCAB, VOCAB).selected.tolist() == list(range(VOCAB))
    assert f"model.draft_vocab_size={VOCAB}" in capsys.readouterr().out


def test_a_size_may_be_said_in_thousands_of_two_to_the_tenth(
    shards: Path, tmp_path: Path, options: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    """8k is the 8,192 that the table shows; the file is as readable as any other."""
    out, old = tmp_path / "map.safetensors", os.umask(0o022)
    try:
        wanted = ["--write", "1k", "--out", out, "--sizes", "1k,2k", "--vocab-size", 3000]
        assert run(shards, *wanted, *options) == 0
    finally:
        os.umask(old)
    assert load_vocab_map(out, 1024, 3000).draft_size == 1024
    assert out.stat().st_mode & 0o777 == 0o644
    table = capsys.readouterr().out
    assert "1,024" in table
    assert "2,048" in table


def test_special_tokens_are_kept_at_any_frequency(
    shards: Path,
    verifier: Path,
    tmp_path: Path,
    options: list[object],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """28 and 29 come from the tokenizer; 31 has no row in the verifier; 17 is asked for."""
    out = tmp_path / "map.safetensors"
    wanted = ["--verifier", verifier, "--keep", "17", "--write", 4, "--out", out, "--sizes", "4"]
    assert run(shards, *wanted, *options) == 0
    assert load_vocab_map(out, 4, VOCAB).selected.tolist() == [7, 17, 28, 29]
    assert "always kept: 3 tokens, 3 of them in no response" in capsys.readouterr().out
    origin = read_origin(out)
    assert origin.tokenizer_fingerprint == tokenizer_fingerprint(verifier)
    assert (origin.tokenizer_name, origin.counted_tokens) == ("verifier", 20)


def test_the_fingerprint_is_that_of_the_documents(
    shards: Path, tmp_path: Path, options: list[object]
) -> None:
    """One directory, or its halves in two: the same data, the same counts, the same map."""
    for number in range(5):
        target = tmp_path / f"half_{number % 2}" / f"data_{number}.pt"
        target.parent.mkdir(exist_ok=True)
        target.write_bytes((shards / f"data_{number}.pt").read_bytes())
    halves = [tmp_path / "half_1", tmp_path / "half_0"]
    files = [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
    for directories, out in zip(([shards], halves), files, strict=True):
        wanted = ["--write", 3, "--out", out, "--vocab-size", VOCAB]
        assert run(*directories, *wanted, *options) == 0
    one, two = map(read_origin, files)
    assert one == two
    assert one.data_fingerprint is not None
    assert files[0].read_bytes() == files[1].read_bytes()


def test_states_are_not_read(tmp_path: Path, options: list[object]) -> None:
    """Bytes that read calls returned, as the kernel counts them, against those of the states."""
    states = 0
    for i in range(4):
        path = tmp_path / "shards" / f"data_{i}.pt"
        write_document(path, [1] * 20, [2] * 40 + [i], hidden_size=4096)
        states += 61 * 4 * 4096 * 4
    run(tmp_path / "shards", "--vocab-size", VOCAB, *options)
    (tmp_path / "cache").rename(tmp_path / "seen")
    before = read_bytes()
    run(tmp_path / "shards", "--vocab-size", VOCAB, *options)
    assert read_bytes() - before < states / 20


def read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


def test_only_the_last_turn_counts_on_request(
    tmp_path: Path, options: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "shards" / "data_0.pt"
    write_document(path, [1], [2] * 6)
    sample = torch.load(path, weights_only=True)
    sample["loss_mask"] = torch.tensor([0, 1, 1, 0, 1, 1, 1])
    torch.save(sample, path)
    for train_on, tokens in (("assistant", 5), ("last_turn", 3), ("all", 7)):
        run(tmp_path / "shards", "--train-on", train_on, "--vocab-size", VOCAB, *options)
        assert f"{tokens} response tokens (train_on={train_on})" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["safetensors", "npy"])
def test_an_old_map_beside_a_rebuilt_one(
    form: str,
    shards: Path,
    verifier: Path,
    tmp_path: Path,
    options: list[object],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The old map has 7, 9 and 1, 2, 29: 12 of 20 tokens. Rebuilt: 7, 5, 9, 28, 29: 16 of 20."""
    old, report = VocabMap.from_selected([1, 2, 7, 9, 29], VOCAB), tmp_path / "report.json"
    path = tmp_path / "old.safetensors"
    if form == "safetensors":
        save_vocab_map(path, old)
    else:
        path = tmp_path / "old"
        path.mkdir()
        np.save(path / "d2t.npy", old.d2t.numpy())
        np.save(path / "t2d.npy", old.t2d.numpy())
    wanted = ["--compare", path, "--verifier", verifier, "--json", report]
    assert run(shards, *wanted, *options) == 0
    found = json.loads(report.read_text())["comparison"]
    assert (found["coverage"], found["rebuilt_coverage"]) == pytest.approx((0.6, 0.8))
    assert found["only_rebuilt"] == {
        "tokens": 2,
        "occurrences": 4,
        "first": [
            {"token": 5, "spelling": "t5", "count": 4},
            {"token": 28, "spelling": "<think>", "count": 0},
        ],
    }
    assert [token["token"] for token in found["only_old"]["first"]] == [1, 2]
    assert [token["spelling"] for token in found["missing_kept"]["first"]] == ["<think>"]
    out = capsys.readouterr().out
    assert "5 tokens cover 60.000% of these responses; rebuilt at this size 80.000%" in out
    assert "special tokens that it lacks: 1 tokens" in out
    assert "not recorded" in out


def test_a_map_of_another_tokenizer_is_not_compared(
    shards: Path, verifier: Path, tmp_path: Path, options: list[object]
) -> None:
    path = tmp_path / "map.safetensors"
    run(shards, "--verifier", verifier, "--write", 5, "--out", path, *options)
    tokenizer = json.loads((verifier / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["t1"], vocabulary["t2"] = 2, 1
    (verifier / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(DataError, match="another token there") as caught:
        run(shards, "--verifier", verifier, "--compare", path, *options)
    assert str(path) in str(caught.value)


def test_a_map_of_another_vocabulary_is_not_compared(
    shards: Path, tmp_path: Path, options: list[object]
) -> None:
    save_vocab_map(tmp_path / "map.safetensors", VocabMap.from_selected([1], VOCAB + 1))
    wanted = ["--vocab-size", VOCAB, "--compare", tmp_path / "map.safetensors"]
    with pytest.raises(DataError, match=r"vocabulary of 31 tokens, expected 30"):
        run(shards, *wanted, *options)


def test_an_absolute_map_is_named_so(shards: Path, tmp_path: Path, options: list[object]) -> None:
    old = VocabMap.from_selected([3, 7, 9], VOCAB)
    save_file({"d2t": old.selected, "t2d": old.t2d}, tmp_path / "map.safetensors")
    wanted = ["--vocab-size", VOCAB, "--compare", tmp_path / "map.safetensors"]
    with pytest.raises(DataError, match="it looks absolute"):
        run(shards, *wanted, *options)


@pytest.mark.parametrize(
    ("wanted", "error", "message"),
    [
        (["--vocab-size", 30, "--write", 4], ConfigError, "--out FILE"),
        (["--vocab-size", 30, "--write", 31, "--out", "a.safetensors"], ConfigError, "at most 30"),
        (["--vocab-size", 30, "--write", 4, "--out", "a.pt"], ConfigError, r"\.safetensors"),
        (["--vocab-size", 30, "--keep", "30"], ConfigError, r"id 30, expected ids 0\.\.29"),
        (["--vocab-size", 30, "--sizes", "2", "--keep", "1,2,3"], ConfigError, "3 ids to keep"),
        ([], ConfigError, "--vocab-size N"),
        (["--vocab-size", 15, "--max-bad-samples", 2], DataError, r"found token ids 3\.\.20"),
        (["--vocab-size", 30, "--tokenizer", "gone.json"], DataError, "no such file"),
    ],
    ids=[
        "write",
        "past it",
        "another form",
        "keep",
        "too small",
        "no size",
        "ids past it",
        "tokenizer",
    ],
)
def test_what_cannot_be_done_is_said(
    wanted: list[object], error: type[Exception], message: str, shards: Path, options: list[object]
) -> None:
    with pytest.raises(error, match=message):
        run(shards, *wanted, *options)


def test_bad_samples_are_named_and_left_out(
    shards: Path, options: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    (shards / "data_1.pt").write_bytes(b"cut")
    assert run(shards, "--vocab-size", VOCAB, *options) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"warning: left out: {shards / 'data_1.pt'}")
    assert "in 4 documents" in out


def test_a_file_replaced_while_it_is_counted_stops(
    shards: Path, options: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index has the old ids; the hash tells."""
    count = vocab_coverage.token_frequencies

    def replace_first(*arguments: Any) -> torch.Tensor:
        write_document(shards / "data_0.pt", [4] * 2, ANSWERS[0::5])
        return count(*arguments)

    monkeypatch.setattr(vocab_coverage, "token_frequencies", replace_first)
    with pytest.raises(DataError, match="other token ids"):
        run(shards, "--vocab-size", VOCAB, *options)


def test_the_directory_is_left_alone(shards: Path, options: list[object]) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in shards.iterdir()}
    run(shards, "--vocab-size", VOCAB, *options)
    assert {path.name: path.stat().st_mtime_ns for path in shards.iterdir()} == before
