"""Vocabulary maps on disk: read with every check that a map allows, and written with their origin.

A map comes from many tools: a safetensors file, a ``.pt`` file with a dict, or a directory with one
``.npy`` or ``.pt`` file each. All hold ``d2t`` and ``t2d`` (see :mod:`eagle3.data.vocab`); in a
directory they may also be called ``d2t-{V}`` and ``t2d-{V}``.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from eagle3.data.tokenizer_fingerprint import read_tokenizer
from eagle3.data.vocab import VocabMap
from eagle3.errors import DataError

_KEYS = ("d2t", "t2d")
_HEADER_KEY = "eagle3"


@dataclass(frozen=True)
class MapOrigin:
    """Where a map came from, kept in the header of its safetensors file; None: not recorded.

    The header's key ``eagle3`` holds it as JSON, with ``draft_size`` and ``verifier_size``.
    """

    data_fingerprint: str | None = None
    """Of the documents whose tokens were counted."""
    tokenizer_fingerprint: str | None = None
    """See :mod:`eagle3.data.tokenizer_fingerprint`."""
    tokenizer_name: str | None = None
    """Directory that the tokenizer lay in, for people."""
    counted_tokens: int | None = None
    """Supervised tokens that were counted."""


def save_vocab_map(path: Path | str, vocab_map: VocabMap, origin: MapOrigin | None = None) -> None:
    """Write a safetensors file with ``d2t`` and ``t2d``, in one step.

    Raises:
        DataError: the file cannot be written.
    """
    path = Path(path)
    sizes = {"draft_size": vocab_map.draft_size, "verifier_size": vocab_map.verifier_size}
    # one key, because the library writes several in a random order
    header = {_HEADER_KEY: json.dumps(sizes | vars(origin or MapOrigin()))}
    tensors = {"d2t": vocab_map.d2t.contiguous(), "t2d": vocab_map.t2d.contiguous()}
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(save(tensors, header))  # the library's own file is its owner's alone
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise DataError(
            f"{path}: cannot be written ({error}), expected a place for the vocabulary map. Free "
            "space there, or choose another path."
        ) from error


def load_vocab_map(path: Path | str, draft_size: int, verifier_size: int) -> VocabMap:
    """Read a map and check it against the configured sizes and against itself.

    Raises:
        DataError: the map cannot be read, has other sizes or dtypes, contradicts itself, or holds
            absolute ids instead of offsets.
    """
    path = Path(path)
    vocab_map = _read(path, draft_size)
    _check_sizes(vocab_map, min(draft_size, verifier_size), verifier_size, path)
    check_consistency(vocab_map, path)
    return vocab_map


def read_vocab_map(path: Path | str) -> VocabMap:
    """Read a map of any size and check it against itself.

    Raises:
        DataError: as :func:`load_vocab_map`, but for sizes.
    """
    path = Path(path)
    vocab_map = _read(path, None)
    check_consistency(vocab_map, path)
    return vocab_map


def read_origin(path: Path | str) -> MapOrigin:
    """What the header of a map says; nothing for the forms that have no header.

    Raises:
        DataError: a safetensors file that cannot be read.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        return MapOrigin()
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get(_HEADER_KEY, "{}"))
    except (OSError, SafetensorError, ValueError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(header, dict):
        raise _unreadable(path, ValueError(f"header key '{_HEADER_KEY}' is no JSON object"))
    return MapOrigin(**{field.name: header.get(field.name) for field in fields(MapOrigin)})


def check_tokenizer(path: Path | str, verifier: Path | str) -> str:
    """Compare the tokenizer that a map was built for with the verifier's; returns a line about it.

    ``verifier`` is its directory, or the file of its tokenizer. The states' engine does not matter,
    only that a token id means the same.

    Raises:
        DataError: both are known, and differ.
    """
    recorded, found = read_origin(path), read_tokenizer(Path(verifier))
    if recorded.tokenizer_fingerprint is None:
        return "tokenizer of the vocabulary map: not recorded, so it was not compared"
    if found is None:
        return (
            f"tokenizer of the vocabulary map: {recorded.tokenizer_fingerprint}; not compared, "
            f"because {verifier} holds no tokenizer"
        )
    if recorded.tokenizer_fingerprint != found.fingerprint:
        raise DataError(
            f"{path}: found a map for the tokenizer of {recorded.tokenizer_name or 'no name'} "
            f"({recorded.tokenizer_fingerprint}), expected one for {found.path} "
            f"({found.fingerprint}): the same id is another token there. Build the map again with "
            "python -m eagle3.shards vocab, or set paths.vocab_map to the map of this verifier."
        )
    return f"tokenizer of the vocabulary map: the verifier's ({found.fingerprint})"


def _read(path: Path, draft_size: int | None) -> VocabMap:
    tensors = _read_directory(path, draft_size) if path.is_dir() else _read_file(path)
    for key in _KEYS:
        if not isinstance(tensors.get(key), Tensor):
            raise DataError(
                f"{path}: key '{key}': found {', '.join(sorted(map(str, tensors))) or 'nothing'}, "
                "expected tensors d2t and t2d. Set paths.vocab_map to a vocabulary map."
            )
    return VocabMap(
        _integers(tensors["d2t"], f"{path}: key 'd2t'"), _mask(tensors["t2d"], f"{path}: key 't2d'")
    )


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error
    except Exception as error:  # a damaged file may fail anywhere in the unpickler
        raise DataError(
            f"{path}: cannot be loaded as tensors only, expected a torch.save file of a dict with "
            "d2t and t2d. Build the vocabulary map again."
        ) from error
    return content if isinstance(content, dict) else {}


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(
        f"{path}: cannot be read ({error}), expected a vocabulary map. Set paths.vocab_map to "
        "a .safetensors or .pt file, or to a directory with d2t and t2d."
    )


def _read_directory(path: Path, draft_size: int | None) -> dict[str, Tensor]:
    stems = "*" if draft_size is None else str(draft_size)
    wanted = "any size" if draft_size is None else f"model.draft_vocab_size={draft_size}"
    tensors = {}
    for key in _KEYS:
        names = [f"{stem}{end}" for stem in (key, f"{key}-{stems}") for end in (".npy", ".pt")]
        found = sorted(set(_matches(path, names)), key=lambda p: p.name)
        if len(found) != 1:
            raise DataError(
                f"{path}: found {', '.join(p.name for p in found) or 'none'} of "
                f"{', '.join(names)}, expected exactly one. Set paths.vocab_map to a vocabulary "
                f"map of {wanted}, or leave one file."
            )
        tensors[key] = _read_array(found[0])
    return tensors


def _matches(directory: Path, patterns: Iterable[str]) -> list[Path]:
    return [path for pattern in patterns for path in directory.glob(pattern) if path.is_file()]


def _read_array(path: Path) -> Tensor:
    try:
        if path.suffix == ".npy":
            return torch.from_numpy(np.load(path, allow_pickle=False))
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # either reader may fail anywhere in a damaged file
        raise DataError(
            f"{path}: cannot be loaded as one array ({type(error).__name__}), expected a .npy or "
            "torch.save file. Build the vocabulary map again."
        ) from error


def _integers(d2t: Tensor, where: str) -> Tensor:
    if d2t.ndim != 1 or d2t.dtype not in (torch.int64, torch.int32):
        raise DataError(
            f"{where}: found {d2t.dtype} {list(d2t.shape)}, expected int64 offsets [V]. "
            "Build the vocabulary map again."
        )
    return d2t.long()


def _mask(t2d: Tensor, where: str) -> Tensor:
    if t2d.ndim != 1 or t2d.dtype != torch.bool:
        raise DataError(
            f"{where}: found {t2d.dtype} {list(t2d.shape)}, expected a bool mask [W]. "
            "Build the vocabulary map again."
        )
    return t2d


def _check_sizes(vocab_map: VocabMap, draft_size: int, verifier_size: int, path: Path) -> None:
    found = (vocab_map.draft_size, vocab_map.verifier_size)
    if found != (draft_size, verifier_size):
        raise DataError(
            f"{path}: keys 'd2t' and 't2d': found sizes {found[0]} and {found[1]}, expected "
            f"{draft_size} (model.draft_vocab_size) and {verifier_size} (model.vocab_size). It is "
            "the map of another drafter or verifier: set paths.vocab_map to the right one, or "
            "correct the sizes."
        )


def check_consistency(vocab_map: VocabMap, path: Path) -> None:
    """``d2t`` and ``t2d`` name the same ascending ids, else which of the usual mistakes it is."""
    where = f"{path}: key 'd2t'"
    selected, masked = vocab_map.selected, vocab_map.t2d.nonzero().squeeze(1)
    if len(masked) != len(selected):
        raise DataError(
            f"{path}: key 't2d': found {len(masked)} selected tokens, expected "
            f"{len(selected)}, the length of d2t. Build the vocabulary map again."
        )
    if torch.equal(selected, masked):
        return
    if torch.equal(vocab_map.d2t, masked):
        raise DataError(
            f"{where}: found values equal to the ids that t2d selects: it looks absolute, expected "
            "offsets (verifier id = draft id + d2t[draft id]). Save d2t - arange(V) instead."
        )
    low, high = int(selected.min()), int(selected.max())
    if low < 0 or high >= vocab_map.verifier_size:
        raise DataError(
            f"{where}: found verifier ids {low}..{high}, expected 0.."
            f"{vocab_map.verifier_size - 1}. Build the vocabulary map again."
        )
    if not bool((selected.diff() > 0).all()):
        raise DataError(
            f"{where}: found verifier ids that do not ascend strictly, expected each draft id to "
            "map to a higher verifier id than the one before. Build the vocabulary map again."
        )
    first = int((selected != masked).nonzero()[0])
    raise DataError(
        f"{where}: found verifier id {int(selected[first])} for draft id {first}, expected "
        f"{int(masked[first])} as t2d selects. Build the vocabulary map again."
    )
