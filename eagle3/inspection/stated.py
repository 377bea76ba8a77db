"""Sizes that a directory of captured states may not say, and who says them instead.

In this order: the command line, a native manifest, the verifier's ``config.json``, the
``data_config.json`` of a capture, and last what the first readable file holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle3.data.declaration import CONFIG_NAME, Declaration
from eagle3.data.formats import nothing_to_open
from eagle3.data.layout import StateLayout
from eagle3.data.native import is_native, read_layout
from eagle3.data.safetensors_file import SafetensorsFile
from eagle3.data.speculators import list_states
from eagle3.data.speculators_v1 import list_documents
from eagle3.data.torch_zip import StoredTensor, TorchZip
from eagle3.errors import ConfigError, DataError
from eagle3.model.weights import read_verifier_config
from eagle3.names import LastHidden, LayerIdConvention

COMMAND_LINE = "command line"
_UNKNOWN_VOCAB = 2**31 - 1
_TRIED_FILES = 10
_LIST = "hidden_states as a list of tensors [n, H], one per layer (list(tensor.unbind(axis)))"

Values = Mapping[str, int | None]


@dataclass(frozen=True)
class GivenFacts:
    """What the user says about a directory; None: nothing."""

    aux_layer_ids: tuple[int, ...] | None = None
    layer_id_convention: LayerIdConvention | None = None
    last_hidden: LastHidden | None = None
    num_aux_layers: int | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None

    @property
    def declaration(self) -> Declaration:
        """The part about what the states are."""
        return Declaration(self.aux_layer_ids, self.layer_id_convention, self.last_hidden)

    @property
    def sizes(self) -> Values:
        """The part about how large they are."""
        ids = self.aux_layer_ids
        return {
            "num_aux_layers": self.num_aux_layers or (None if ids is None else len(ids)),
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
        }


@dataclass(frozen=True)
class Sizes:
    """Sizes of the states, each with its origin."""

    layout: StateLayout
    said_by: dict[str, str]
    """``num_aux_layers``, ``hidden_size`` and, unless nobody says it, ``vocab_size``."""

    @property
    def vocab_size(self) -> int | None:
        """Of the verifier; None: unknown, and any token id passes as one of its tokens."""
        return self.layout.vocab_size if "vocab_size" in self.said_by else None

    def with_vocab(self) -> StateLayout:
        """The layout, for what cannot do without the vocabulary's size.

        Raises:
            ConfigError: nobody says it.
        """
        if self.vocab_size is None:
            raise ConfigError(
                "the size of the verifier's vocabulary is not known: neither the directory nor "
                "the command line says it. Give --verifier DIR or --vocab-size N."
            )
        return self.layout


def find_sizes(directory: Path, given: GivenFacts, verifier: Path | None) -> Sizes:
    """Ask everybody in turn, files last and only where they are needed.

    Raises:
        DataError: there is no such directory, a file that speaks cannot be read, or nobody knows
            the number of layers or their size.
        VerifierError: ``verifier`` has no ``config.json`` of a causal model.
    """
    if not directory.is_dir():
        raise DataError(
            f"{directory}: found no such directory, expected captured hidden states. Check the "
            "path, and that the disk is mounted."
        )
    found: dict[str, int] = {}
    said_by: dict[str, str] = {}
    for origin, values in _voices(directory, given, verifier):
        for name, value in values.items():
            if value is not None and name not in found:
                found[name], said_by[name] = value, origin
        if {"num_aux_layers", "hidden_size", "vocab_size"} <= found.keys():
            break
    missing = [name for name in ("num_aux_layers", "hidden_size") if name not in found]
    if missing:
        raise _unknown(directory, missing)
    vocab_size = found.get("vocab_size", _UNKNOWN_VOCAB)
    layout = StateLayout(found["num_aux_layers"], found["hidden_size"], vocab_size)
    return Sizes(layout, said_by)


def _voices(
    directory: Path, given: GivenFacts, verifier: Path | None
) -> Iterator[tuple[str, Values]]:
    yield COMMAND_LINE, given.sizes
    if is_native(directory):
        yield "manifest.json", vars(read_layout(directory))
    if verifier is not None:
        config = read_verifier_config(verifier)
        sizes = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
        yield "verifier's config.json", sizes
    yield CONFIG_NAME, _data_config(directory / CONFIG_NAME)
    yield from _first_file(directory)


def _data_config(path: Path) -> Values:
    """Sizes of the model that a capture recorded."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON ({error}). Repair or remove the file.") from error
    model = content.get("model", {}) if isinstance(content, dict) else {}
    names = ("hidden_size", "vocab_size")
    return {name: model[name] for name in names if isinstance(model.get(name), int)}


def _first_file(directory: Path) -> Iterator[tuple[str, Values]]:
    """What the first file says that can be read; of a damaged directory nothing."""
    for name in _state_files(directory)[:_TRIED_FILES]:
        try:
            yield name, _measured(directory / name)
        except DataError:  # recorded as a bad file when it is indexed
            continue
        return


def _state_files(directory: Path) -> tuple[str, ...]:
    return (*list_documents(directory), *list_states(directory))


def _unknown(directory: Path, missing: Sequence[str]) -> DataError:
    """Nobody says a size: why not."""
    files = _state_files(directory)
    if not files:
        return nothing_to_open(directory)
    options = " and ".join(f"--{name.replace('_', '-')}" for name in missing)
    tried = min(len(files), _TRIED_FILES)
    try:
        _measured(directory / files[0])
        reason = "it was not there a moment ago"
    except DataError as error:
        reason = str(error)
    return DataError(
        f"{directory}: none of the first {tried} of {len(files):,} files says how large its states "
        f"are; the first: {reason}\nIf others are as they should be, give {options}."
    )


def _measured(path: Path) -> Values:
    """Sizes of the states in one file.

    Raises:
        DataError: it cannot be read, or they are laid out in no known way.
    """
    if path.suffix == ".safetensors":
        with SafetensorsFile(path) as file:
            tensor = file.tensors.get("hidden_states")
        if tensor is None or len(tensor.shape) != 3:
            found = ", ".join(f"{key} {list(t.shape)}" for key, t in file.tensors.items())
            raise _not_laid_out(path, found or "no tensors", "hidden_states [n, layers, H]")
        return {"num_aux_layers": tensor.shape[1] - 1, "hidden_size": tensor.shape[2]}
    with TorchZip(path) as archive:
        content = archive.content()
    keys = list(map(str, content)) if isinstance(content, dict) else []
    states = content.get("hidden_states") if keys else None
    if isinstance(states, StoredTensor):
        raise _not_laid_out(path, f"hidden_states {list(states.shape)}, stacked", _LIST)
    if not isinstance(states, list) or not all(isinstance(s, StoredTensor) for s in states):
        raise _not_laid_out(path, f"keys {', '.join(keys) or 'none'}", _LIST)
    sizes = {state.shape[-1] for state in states if state.shape}
    if not sizes:
        raise _not_laid_out(path, "hidden_states without tensors", _LIST)
    return {"num_aux_layers": len(states) - 1, "hidden_size": sizes.pop()}


def _not_laid_out(path: Path, found: str, expected: str) -> DataError:
    return DataError(f"{path}: found {found}, expected {expected}. Is it a file of another format?")
