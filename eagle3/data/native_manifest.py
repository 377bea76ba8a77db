"""``manifest.json`` of a native directory: what the states are, and what must be there.

It is written last and in one step, so a directory with a manifest is complete. Its own checksum
is in it, so that no damaged byte goes unnoticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any, TypeVar

from eagle3.data.declaration import check_layer_ids
from eagle3.data.layout import StateLayout
from eagle3.data.native_shard import DTYPE_CODES, ShardLayout
from eagle3.errors import DataError
from eagle3.names import LastHidden, LayerIdConvention

MANIFEST_NAME = "manifest.json"
INDEX_NAME = "index.npz"
FORMAT, FORMAT_VERSION = "eagle3", 1
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class VerifierFacts:
    """Whose states they are; None: not recorded."""

    name: str | None = None
    tokenizer_fingerprint: str | None = None
    chat_template_fingerprint: str | None = None
    quantization: str | None = None


@dataclass(frozen=True)
class StateFacts:
    """What the states are."""

    layout: StateLayout
    dtype: str
    """Named as in torch."""
    aux_layer_ids: tuple[int, ...]
    """*entering* convention, low to high."""
    last_hidden: LastHidden


@dataclass(frozen=True)
class ShardFacts:
    """One file of states."""

    file: str
    bytes: int
    num_samples: int
    num_tokens: int
    """Rows of its tensors."""
    blake2b: str
    """Of the whole file, 32 bytes in hexadecimal digits."""


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``."""

    created_by: str
    verifier: VerifierFacts
    states: StateFacts
    num_samples: int
    num_tokens: int
    num_supervised_tokens: int
    fingerprint: str
    """Of the documents, :attr:`eagle3.data.index.DocumentIndex.fingerprint`."""
    shards: tuple[ShardFacts, ...]
    index_blake2b: str
    """Of ``index.npz``."""

    def shard_layout(self, shard: int) -> ShardLayout:
        """Places in the file ``shards[shard]``."""
        return ShardLayout(self.states.layout, self.states.dtype, self.shards[shard].num_tokens)


def digest(content: bytes) -> str:
    """blake2b of 32 bytes, in hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=32).hexdigest()


def manifest_text(manifest: Manifest) -> str:
    """The file's content."""
    states, layout = manifest.states, manifest.states.layout
    content: dict[str, Any] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "created_by": manifest.created_by,
        "verifier": {
            **asdict(manifest.verifier),
            "hidden_size": layout.hidden_size,
            "vocab_size": layout.vocab_size,
        },
        "hidden_states": {
            "dtype": states.dtype,
            "num_aux_layers": layout.num_aux_layers,
            "aux_layer_ids": list(states.aux_layer_ids),
            "layer_id_convention": str(LayerIdConvention.entering),
            "last_hidden": str(states.last_hidden),
        },
        "num_samples": manifest.num_samples,
        "num_tokens": manifest.num_tokens,
        "num_supervised_tokens": manifest.num_supervised_tokens,
        "fingerprint": manifest.fingerprint,
        "shards": [asdict(shard) for shard in manifest.shards],
        "index": {"file": INDEX_NAME, "blake2b": manifest.index_blake2b},
    }
    return json.dumps({**content, "blake2b": _own_digest(content)}, indent=2) + "\n"


def read_manifest(directory: Path) -> Manifest:
    """Read and check ``manifest.json``.

    Raises:
        DataError: it is missing, damaged, of another version, or contradicts itself.
    """
    path = directory / MANIFEST_NAME
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}). Check the disk and the file.") from None
    except ValueError as error:
        raise DataError(
            f"{path}: not valid JSON ({error}). The file is damaged: copy it again from its "
            "origin, or convert the directory again."
        ) from error
    _check_version(content, path)
    _check_own_digest(content, path)
    manifest = _parse(_Section(content, str(path), ""))
    _check_sums(manifest, path)
    return manifest


class _Section:
    """A JSON object whose values are taken with a check."""

    def __init__(self, content: Any, path: str, prefix: str) -> None:
        self._content, self._path, self._prefix = content, path, prefix
        if not isinstance(content, dict):
            raise DataError(
                f"{path}: key '{prefix.rstrip('.')}': found {content!r:.80}, expected an object."
            )

    def where(self, key: str) -> str:
        """Path and key for a message."""
        return f"{self._path}: key '{self._prefix}{key}'"

    def get(self, key: str, kind: type[_Value]) -> _Value:
        """The value of ``key``, which has to be there, of ``kind``; numbers not negative."""
        value = self._content.get(key)
        wrong = not isinstance(value, kind) or isinstance(value, bool)
        if wrong or (isinstance(value, int) and value < 0):
            raise DataError(
                f"{self.where(key)}: found {value!r:.80}, expected {_KINDS[kind]}. The file is "
                "damaged or of a newer version: copy it again, or convert the directory again."
            )
        return value

    def text_or_none(self, key: str) -> str | None:
        """A string, or None where it is null or missing."""
        return None if self._content.get(key) is None else self.get(key, str)

    def section(self, key: str) -> _Section:
        """The object under ``key``."""
        return _Section(self.get(key, dict), self._path, f"{self._prefix}{key}.")

    def one_of(self, key: str, choices: Iterable[str]) -> str:
        """A string that is one of ``choices``."""
        value, allowed = self.get(key, str), list(choices)
        if value not in allowed:
            raise DataError(
                f"{self.where(key)}: found {value!r}, expected one of {', '.join(allowed)}."
            )
        return value


_KINDS: dict[type, str] = {
    str: "a string",
    int: "an integer of at least 0",
    list: "a list",
    dict: "an object",
}


def _parse(content: _Section) -> Manifest:
    verifier, states = content.section("verifier"), content.section("hidden_states")
    layout = StateLayout(
        states.get("num_aux_layers", int),
        verifier.get("hidden_size", int),
        verifier.get("vocab_size", int),
    )
    states.one_of("layer_id_convention", [LayerIdConvention.entering])
    facts = StateFacts(
        layout=layout,
        dtype=states.one_of("dtype", DTYPE_CODES),
        aux_layer_ids=check_layer_ids(
            states.get("aux_layer_ids", list),
            (layout.num_aux_layers,),
            states.where("aux_layer_ids"),
        ),
        last_hidden=LastHidden(states.one_of("last_hidden", LastHidden)),
    )
    index = content.section("index")
    index.one_of("file", [INDEX_NAME])
    shards = enumerate(content.get("shards", list))
    return Manifest(
        created_by=content.get("created_by", str),
        verifier=VerifierFacts(
            verifier.text_or_none("name"),
            verifier.text_or_none("tokenizer_fingerprint"),
            verifier.text_or_none("chat_template_fingerprint"),
            verifier.text_or_none("quantization"),
        ),
        states=facts,
        num_samples=content.get("num_samples", int),
        num_tokens=content.get("num_tokens", int),
        num_supervised_tokens=content.get("num_supervised_tokens", int),
        fingerprint=content.get("fingerprint", str),
        shards=tuple(_shard(content, place, shard) for place, shard in shards),
        index_blake2b=index.get("blake2b", str),
    )


def _shard(content: _Section, place: int, found: Any) -> ShardFacts:
    shard = _Section(found, content.where("").partition(": key")[0], f"shards[{place}].")
    file = shard.get("file", str)
    if PurePath(file).name != file:
        raise DataError(f"{shard.where('file')}: found {file!r}, expected a plain file name.")
    return ShardFacts(
        file,
        shard.get("bytes", int),
        shard.get("num_samples", int),
        shard.get("num_tokens", int),
        shard.get("blake2b", str),
    )


def _check_version(content: Any, path: Path) -> None:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise DataError(
            f"{path}: key 'format': found {found!r:.80}, expected {FORMAT!r}. It is not the "
            "manifest of a native directory of hidden states."
        )
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise DataError(
            f"{path}: key 'format_version': found {version!r}, expected {FORMAT_VERSION}. The "
            "directory was written by another version of eagle3: update eagle3, or convert the "
            "original capture again with this one."
        )


def _own_digest(content: dict[str, Any]) -> str:
    return digest(json.dumps(content, sort_keys=True).encode())


def _check_own_digest(content: dict[str, Any], path: Path) -> None:
    stated = content.get("blake2b")
    found = _own_digest({key: value for key, value in content.items() if key != "blake2b"})
    if "blake2b" in content and found != stated:
        raise DataError(
            f"{path}: key 'blake2b': found content with the checksum {found}, expected "
            f"{stated!s:.80}: the file is damaged, or was edited by hand. Copy it again "
            "from its origin. If the edit is meant, remove the key 'blake2b' from it."
        )


def _check_sums(manifest: Manifest, path: Path) -> None:
    """What is said twice must be said alike."""
    for key in ("num_samples", "num_tokens"):
        stated, total = getattr(manifest, key), sum(getattr(s, key) for s in manifest.shards)
        if stated != total:
            raise DataError(
                f"{path}: key '{key}': found {stated}, expected {total}, the sum over the shards. "
                "The file is damaged: copy it again, or convert the directory again."
            )
    for place, shard in enumerate(manifest.shards):
        expected = manifest.shard_layout(place).num_bytes
        if shard.bytes != expected:
            raise DataError(
                f"{path}: key 'shards[{place}].bytes': found {shard.bytes}, expected {expected} "
                f"for {shard.num_tokens} tokens. The file is damaged: copy it again, or convert "
                "the directory again."
            )
