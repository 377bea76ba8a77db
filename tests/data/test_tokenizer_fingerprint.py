"""Identity of a tokenizer: its pairs of token and id, whatever file they stand in."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from eagle3.data.tokenizer_fingerprint import (
    config_tokens,
    read_tokenizer,
    tokenizer_fingerprint,
)
from eagle3.errors import DataError

VOCABULARY = {"a": 0, "b": 1, "\u0120the": 2, "\u010a": 3}
"""The last two are " the" and a line feed as byte-level tokenizers spell them."""
ADDED = {"<|im_end|>": 4, "<think>": 5}


def huggingface(
    directory: Path,
    vocabulary: dict[str, int] = VOCABULARY,
    added: dict[str, int] = ADDED,
    **more: Any,
) -> Path:
    directory.mkdir(exist_ok=True)
    tokens = [{"id": i, "content": token, "special": i == 4} for token, i in added.items()]
    content = {"model": {"type": "BPE", "vocab": vocabulary}, "added_tokens": tokens} | more
    (directory / "tokenizer.json").write_text(json.dumps(content))
    return directory


def tiktoken(directory: Path, ranks: dict[bytes, int], added: dict[str, int] = ADDED) -> Path:
    directory.mkdir()
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in ranks.items()]
    (directory / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    listed = {str(i): {"content": token} for token, i in added.items()}
    (directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    return directory


RANKS = {b"a": 0, b"b": 1, b" the": 2, b"\n": 3}


def test_only_tokens_and_ids_count(tmp_path: Path) -> None:
    first = huggingface(tmp_path / "a")
    turned = huggingface(
        tmp_path / "b", dict(reversed(VOCABULARY.items())), padding={"length": 7}, merges=["a b"]
    )
    assert tokenizer_fingerprint(first) == tokenizer_fingerprint(turned)
    assert tokenizer_fingerprint(first) == tokenizer_fingerprint(first / "tokenizer.json")


@pytest.mark.parametrize(
    ("vocabulary", "added"),
    [
        (VOCABULARY | {"b": 7}, ADDED),
        (VOCABULARY | {"c": 7}, ADDED),
        (VOCABULARY, ADDED | {"<tool_call>": 6}),
        (VOCABULARY, {"<|im_end|>": 5, "<think>": 4}),
    ],
    ids=["another id", "one more token", "one more added token", "added tokens exchanged"],
)
def test_any_other_vocabulary_differs(
    tmp_path: Path, vocabulary: dict[str, int], added: dict[str, int]
) -> None:
    ours = tokenizer_fingerprint(huggingface(tmp_path / "a"))
    assert tokenizer_fingerprint(huggingface(tmp_path / "b", vocabulary, added)) != ours


def test_an_added_token_that_is_in_the_model_too_counts_once(tmp_path: Path) -> None:
    plain = tokenizer_fingerprint(huggingface(tmp_path / "a"))
    doubled = tokenizer_fingerprint(huggingface(tmp_path / "b", VOCABULARY | ADDED))
    assert plain == doubled


def test_tiktoken_ranks_and_a_conversion_of_them_agree(tmp_path: Path) -> None:
    ranks = tiktoken(tmp_path / "tiktoken", RANKS)
    found = read_tokenizer(ranks)
    assert found is not None
    assert dict(found.vocabulary) == VOCABULARY | ADDED
    assert dict(found.added) == ADDED
    assert found.fingerprint == tokenizer_fingerprint(huggingface(tmp_path / "converted"))
    other = tiktoken(tmp_path / "other", RANKS | {b"b": 9})
    assert tokenizer_fingerprint(other) != found.fingerprint


def test_every_byte_has_a_spelling_of_its_own(tmp_path: Path) -> None:
    ranks = {bytes([byte]): byte for byte in range(256)}
    found = read_tokenizer(tiktoken(tmp_path / "bytes", ranks, {}))
    assert found is not None
    assert sorted(found.vocabulary.values()) == list(range(256))
    assert all(token.isprintable() for token in found.vocabulary)
    assert found.vocabulary["A"] == 65
    assert found.vocabulary["\u0120"] == 32


def test_a_unigram_vocabulary_is_a_list(tmp_path: Path) -> None:
    model = {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]]}
    listed = read_tokenizer(huggingface(tmp_path / "a", model=model))
    assert listed is not None
    assert dict(listed.vocabulary) == {"a": 0, "b": 1} | ADDED


def test_no_tokenizer_is_none(tmp_path: Path) -> None:
    assert read_tokenizer(tmp_path) is None
    assert tokenizer_fingerprint(tmp_path) is None
    with pytest.raises(DataError, match="no such file"):
        read_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "cannot be read as JSON"),
        ("tokenizer.json", "[]", "expected a JSON object"),
        ("tokenizer.json", '{"model": {}}', "model.vocab"),
        ("tokenizer.json", '{"model": {"vocab": {}}, "added_tokens": [3]}', "added_tokens"),
        ("tiktoken.model", "YQ== 0\nsentencepiece", "base64 rank"),
        ("tiktoken.model", "!!! 0", "base64 rank"),
    ],
)
def test_a_damaged_tokenizer_is_named(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        read_tokenizer(tmp_path)
    assert str(tmp_path / name) in str(caught.value)


def test_ends_come_from_both_configs_and_the_text_part(tmp_path: Path) -> None:
    assert config_tokens(tmp_path) == frozenset()
    config = {"bos_token_id": 1, "eos_token_id": None, "text_config": {"eos_token_id": 9}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9]}))
    assert config_tokens(tmp_path) == {1, 5, 9}
