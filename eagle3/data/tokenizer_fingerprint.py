"""What the token ids of a verifier mean: its vocabulary, a fingerprint of it, its special tokens.

The fingerprint covers the pairs (token, id) and nothing else, so files that were saved again by
another library, with other merges' spelling, padding or templates, have the same one. Two forms are
read, and give the same fingerprint for the same byte-level vocabulary:

* ``tokenizer.json`` of Hugging Face tokenizers: ``model.vocab`` and ``added_tokens``;
* ``tiktoken.model``, lines of ``base64(bytes) rank`` (Kimi, Qwen 1), with the added tokens in
  ``added_tokens_decoder`` of ``tokenizer_config.json`` beside it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.errors import DataError

_FILES = ("tokenizer.json", "tiktoken.model")
_END_KEYS = ("eos_token_id", "bos_token_id")
_DIGEST_BYTES = 12


@dataclass(frozen=True)
class Tokenizer:
    """The vocabulary of a tokenizer."""

    path: Path
    """The file it was read from."""
    vocabulary: Mapping[str, int]
    """Token to id, added tokens included; byte-level tokens in their printable spelling."""
    added: Mapping[str, int]
    """Added tokens: turn ends, think and tool markers, and other tokens that text never gives."""

    @property
    def name(self) -> str:
        """Directory the tokenizer lies in, for people."""
        return self.path.resolve().parent.name

    @property
    def fingerprint(self) -> str:
        """24 hex digits, a hash of the pairs (token, id) in the order of ids."""
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for token, number in sorted(self.vocabulary.items(), key=lambda item: (item[1], item[0])):
            digest.update(json.dumps([token, number]).encode())
        return digest.hexdigest()

    def spelling(self) -> dict[int, str]:
        """Id to token."""
        return {number: token for token, number in self.vocabulary.items()}


def read_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer of a verifier's directory, or of one file; None where there is none.

    Raises:
        DataError: a tokenizer file that is damaged, or of an unknown kind; a file that is missing.
    """
    if path.is_dir():
        found = [path / name for name in _FILES if (path / name).is_file()]
        return _read_file(found[0]) if found else None
    return _read_file(path)


def tokenizer_fingerprint(path: Path) -> str | None:
    """:attr:`Tokenizer.fingerprint` of :func:`read_tokenizer`."""
    tokenizer = read_tokenizer(path)
    return None if tokenizer is None else tokenizer.fingerprint


def config_tokens(verifier: Path) -> frozenset[int]:
    """Ids that ``config.json`` and ``generation_config.json`` call ends or beginnings of a text.

    Raises:
        DataError: one of the files is not JSON.
    """
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if not (verifier / name).is_file():
            continue
        outer = _read_object(verifier / name)
        inner = outer.get("text_config")
        for config in (outer, inner if isinstance(inner, dict) else {}):
            for key in _END_KEYS:
                value = config.get(key)
                ids = value if isinstance(value, list) else [value]
                found |= {number for number in ids if isinstance(number, int)}
    return frozenset(found)


def _read_file(path: Path) -> Tokenizer:
    if not path.is_file():
        raise DataError(
            f"{path}: found no such file, expected {' or '.join(_FILES)} of the verifier, or the "
            "directory that holds it."
        )
    if path.suffix == ".json":
        return _read_huggingface(path)
    return _read_tiktoken(path)


def _read_huggingface(path: Path) -> Tokenizer:
    content = _read_object(path)
    model = content.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    added = content.get("added_tokens") or []
    try:
        if isinstance(vocab, dict):
            vocabulary = {str(token): int(number) for token, number in vocab.items()}
        elif isinstance(vocab, list):  # Unigram: [token, score] in the order of ids
            vocabulary = {str(pair[0]): number for number, pair in enumerate(vocab)}
        else:
            raise TypeError("no model.vocab")
        special = {str(token["content"]): int(token["id"]) for token in added}
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DataError(
            f"{path}: keys 'model.vocab' and 'added_tokens': found something else ({error}), "
            "expected a tokenizer.json of Hugging Face tokenizers. Copy the verifier's file again."
        ) from error
    return Tokenizer(path, vocabulary | special, special)


def _read_tiktoken(path: Path) -> Tokenizer:
    spelling = _byte_spelling()
    vocabulary = {}
    try:
        for line in path.read_bytes().splitlines():
            if line:
                token, rank = line.split()
                text = "".join(spelling[byte] for byte in base64.b64decode(token, validate=True))
                vocabulary[text] = int(rank)
    except ValueError as error:
        raise DataError(
            f"{path}: found a line that is not 'base64 rank' ({error}), expected a tiktoken ranks "
            "file. Copy the verifier's file again; a SentencePiece model is not read."
        ) from error
    config = path.with_name("tokenizer_config.json")
    listed = _read_object(config).get("added_tokens_decoder") if config.is_file() else None
    try:
        special = {str(token["content"]): int(key) for key, token in (listed or {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{config}: key 'added_tokens_decoder': found something else ({error}), expected "
            'objects {"id": {"content": "token"}}. Copy the verifier\'s file again.'
        ) from error
    return Tokenizer(path, vocabulary | special, special)


def _byte_spelling() -> list[str]:
    """One printable character for each byte, as byte-level BPE spells them since GPT-2.

    Printable bytes of Latin-1 stand for themselves, the others for U+0100, U+0101, ... in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256)]


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: cannot be read as JSON ({error}). Copy the verifier's file again."
        ) from error
    if not isinstance(content, dict):
        raise DataError(
            f"{path}: found {type(content).__name__}, expected a JSON object. Copy the verifier's "
            "file again."
        )
    return content
