"""Reader of speculators v1 directories, one ``torch.save`` file per document.

``data_{i}.pt`` holds ``input_ids`` (int64 [n]), ``loss_mask`` (0 or 1, [n]) and ``hidden_states``,
a list of K + 1 tensors [n, H]: K aux states, low layer first, then the last state.

Files are mapped, not read: only the bytes of the rows asked for leave the disk. Nothing in a file
is ever executed (``weights_only=True``).
"""

from __future__ import annotations

import errno
import pickle
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from eagle3.data.declaration import Declaration, StoredDeclaration, read_declaration
from eagle3.errors import DataError

__all__ = ["Declaration", "LayoutError", "Sample", "SpeculatorsV1", "StateLayout"]

_FILE_NAME = re.compile(r"data_(\d+)\.pt")
_ZIP_START = b"PK\x03\x04"
_STATE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class LayoutError(DataError):
    """The states have other sizes than the config says; in the first file, a config mistake."""


@dataclass(frozen=True)
class StateLayout:
    """Sizes that every document of a directory must have."""

    num_aux_layers: int
    hidden_size: int
    vocab_size: int
    """Of the verifier; token ids are below it."""


@dataclass(frozen=True)
class Sample:
    """One document: all its token ids and gates, and the states of a range of its tokens.

    The states may be views of a mapped file. Aux states stay apart, one tensor a layer, so that
    the only copy is the one into the pack; a single tensor [m, K*H] is as good.
    """

    input_ids: Int[Tensor, " N"]
    """int64, the whole document, n tokens."""
    loss_mask: Bool[Tensor, " N"]
    """bool, the whole document as captured: 1 on tokens the verifier produced."""
    aux_hidden: tuple[Tensor, ...]
    """Blocks [m, *] along the feature axis, low layer first; m tokens from the range's start."""
    last_hidden: Tensor
    """[m, H]"""

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def narrow(self, start: int, stop: int) -> Sample:
        """Keep the states of tokens ``[start, stop)`` of a sample that has them all; no copy."""
        return replace(
            self,
            aux_hidden=tuple(block[start:stop] for block in self.aux_hidden),
            last_hidden=self.last_hidden[start:stop],
        )

    def is_finite(self) -> bool:
        """No NaN or inf among the states."""
        return all(_is_finite(block) for block in (*self.aux_hidden, self.last_hidden))


class SpeculatorsV1:
    """The documents of one directory, in numeric order of i.

    Raises:
        DataError: the directory is missing, or has no ``data_{i}.pt``.
    """

    def __init__(self, directory: Path | str, layout: StateLayout) -> None:
        self.directory = Path(directory)
        self.layout = layout
        self.names = list_documents(self.directory)
        """File names, ``data_{i}.pt``."""
        if not self.directory.is_dir():
            raise DataError(
                f"{self.directory}: found no such directory, expected captured hidden states. "
                "Set paths.shards to the directory that holds data_0.pt, data_1.pt, ..."
            )
        if not self.names:
            others = sorted(p.name for p in self.directory.iterdir())[:3]
            raise DataError(
                f"{self.directory}: found {', '.join(others) or 'an empty directory'}, expected "
                "data_0.pt, data_1.pt, ... Set paths.shards to the directory with these files, or "
                "capture them first."
            )

    def declaration(self) -> StoredDeclaration:
        """What ``data_config.json`` says."""
        return read_declaration(self.directory, self.layout.num_aux_layers)

    def open(self, name: str) -> Sample:
        """Map one document and check it.

        Raises:
            LayoutError: wrong number of tensors or wrong hidden size.
            DataError: anything else that is not as it should be.
        """
        path = self.directory / name
        content = _load(path)
        input_ids = _check_ids(_tensor(content, "input_ids", path), self.layout, path)
        loss_mask = _check_mask(_tensor(content, "loss_mask", path), len(input_ids), path)
        states = _check_states(content, len(input_ids), self.layout, path)
        return Sample(input_ids, loss_mask, states[:-1], states[-1])

    def read(self, name: str, start: int, stop: int) -> Sample:
        """One document with the states of tokens ``[start, stop)``, checked to be finite.

        Raises:
            DataError: as :meth:`open`, or NaN or inf in the range.
        """
        sample = self.open(name).narrow(start, stop)
        if not sample.is_finite():
            raise DataError(
                f"{self.directory / name}: key 'hidden_states': found NaN or inf in tokens "
                f"{start}..{stop - 1}, expected finite states. Capture the sample again."
            )
        return sample


def list_documents(directory: Path) -> tuple[str, ...]:
    """Names of the ``data_{i}.pt`` in numeric order; empty for a missing directory."""
    if not directory.is_dir():
        return ()
    found = [m for p in directory.iterdir() if (m := _FILE_NAME.fullmatch(p.name))]
    return tuple(m.group() for m in sorted(found, key=lambda m: (int(m.group(1)), m.group())))


def _is_finite(block: Tensor) -> bool:
    # One pass without a temporary: aminmax propagates NaN, and an inf is a minimum or a maximum.
    return block.numel() == 0 or all(bool(torch.isfinite(x)) for x in torch.aminmax(block))


def _load(path: Path) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        if error.errno == errno.EINVAL:  # a cut file cannot be mapped
            raise DataError(_unreadable(path)) from error
        raise DataError(
            f"{path}: cannot be read ({error}). Check the disk and the file."
        ) from error
    except pickle.UnpicklingError as error:
        raise DataError(
            f"{path}: found objects that are not tensors (or a damaged pickle), expected a dict of "
            "tensors. Such a file is not loaded, because it could run code; capture it again."
        ) from error
    except Exception as error:  # a damaged file may fail anywhere in the unpickler
        raise DataError(_unreadable(path)) from error
    if not isinstance(content, dict):
        raise DataError(
            f"{path}: found {type(content).__name__}, expected a dict with input_ids, loss_mask "
            "and hidden_states. Is it a file of another format?"
        )
    return content


def _unreadable(path: Path) -> str:
    with path.open("rb") as file:
        start = file.read(len(_ZIP_START))
    size = f"{path.stat().st_size:,} bytes"
    if start == _ZIP_START:
        return (
            f"{path}: found a torch.save file of {size} that is cut off or damaged, expected a "
            "complete one. Copy or capture it again."
        )
    return (
        f"{path}: found {size} that are not a torch.save zip file, expected one. An older format "
        "can be converted: torch.save(torch.load(file, weights_only=True), file)."
    )


def _tensor(content: dict[str, Any], key: str, path: Path) -> Tensor:
    value = _value(content, key, path)
    if not isinstance(value, Tensor):
        raise DataError(
            f"{path}: key '{key}': found {type(value).__name__}, expected a tensor [n]. "
            "Capture the sample again."
        )
    return _unbatch(value, 1, f"{path}: key '{key}'")


def _value(content: dict[str, Any], key: str, path: Path) -> Any:
    if key not in content:
        raise DataError(
            f"{path}: key '{key}' is missing: found {', '.join(map(str, content)) or 'no keys'}, "
            "expected input_ids, loss_mask and hidden_states. Is it a file of another format?"
        )
    return content[key]


def _unbatch(value: Tensor, ndim: int, where: str) -> Tensor:
    """Drop a leading batch axis of exactly 1."""
    if value.ndim == ndim + 1 and value.shape[0] == 1:
        value = value[0]
    if value.ndim != ndim:
        axes = "[n]" if ndim == 1 else "[n, H]"
        raise DataError(
            f"{where}: found shape {list(value.shape)}, expected {axes} or [1, "
            f"{axes[1:]}. Store one document per file."
        )
    return value


def _check_ids(ids: Tensor, layout: StateLayout, path: Path) -> Tensor:
    where = f"{path}: key 'input_ids'"
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise DataError(f"{where}: found {ids.dtype}, expected int64. Capture the sample again.")
    ids = ids.long()
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= layout.vocab_size):
        raise DataError(
            f"{where}: found token ids {int(ids.min())}..{int(ids.max())}, expected 0.."
            f"{layout.vocab_size - 1} (model.vocab_size={layout.vocab_size}). Set model.vocab_size "
            "to the verifier's, or capture with the verifier's own tokenizer."
        )
    return ids


def _check_mask(mask: Tensor, num_tokens: int, path: Path) -> Tensor:
    where = f"{path}: key 'loss_mask'"
    if len(mask) != num_tokens:
        raise DataError(
            f"{where}: found length {len(mask)}, expected {num_tokens}, the length of input_ids. "
            "Capture the sample again."
        )
    gate = mask.bool()
    if not torch.equal(gate.to(mask.dtype), mask):
        raise DataError(
            f"{where}: found values other than 0 and 1, expected only these. "
            "Capture the sample again."
        )
    return gate


def _check_states(
    content: dict[str, Any], num_tokens: int, layout: StateLayout, path: Path
) -> tuple[Tensor, ...]:
    where = f"{path}: key 'hidden_states'"
    states = _value(content, "hidden_states", path)
    expected = layout.num_aux_layers + 1
    if isinstance(states, Tensor):
        raise LayoutError(
            f"{where}: found one stacked tensor {list(states.shape)}, expected a list of "
            f"{expected} tensors [n, H]: which axis counts layers is ambiguous. Save "
            "list(tensor.unbind(axis)) with the right axis instead."
        )
    if not isinstance(states, list | tuple) or not all(isinstance(s, Tensor) for s in states):
        raise DataError(f"{where}: found {type(states).__name__}, expected a list of tensors.")
    if len(states) != expected:
        raise LayoutError(
            f"{where}: found {len(states)} tensors, expected {expected} "
            f"({layout.num_aux_layers} aux states and the last state). Set "
            f"model.num_aux_layers={max(len(states) - 1, 1)} if the directory was captured so."
        )
    checked = tuple(
        _check_state(state, num_tokens, layout, f"{where}[{k}]") for k, state in enumerate(states)
    )
    dtypes = sorted({str(state.dtype) for state in checked})
    if len(dtypes) > 1:
        raise DataError(f"{where}: found {' and '.join(dtypes)}, expected one dtype.")
    return checked


def _check_state(state: Tensor, num_tokens: int, layout: StateLayout, where: str) -> Tensor:
    if state.dtype not in _STATE_DTYPES:
        raise DataError(
            f"{where}: found {state.dtype}, expected bfloat16, float16, float32 or float64. "
            "Capture the sample again."
        )
    state = _unbatch(state, 2, where)
    if state.shape[1] != layout.hidden_size:
        raise LayoutError(
            f"{where}: found hidden size {state.shape[1]}, expected {layout.hidden_size} "
            "(model.hidden_size). Set model.hidden_size to the verifier's, or use its captures."
        )
    if state.shape[0] != num_tokens:
        raise DataError(
            f"{where}: found {state.shape[0]} rows, expected {num_tokens}, the length of "
            "input_ids. Capture the sample again."
        )
    return state
