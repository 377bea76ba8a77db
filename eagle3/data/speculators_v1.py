"""Directories of speculators v1: one ``torch.save`` file per document.

``data_{i}.pt`` holds ``input_ids`` (int64 [n]), ``loss_mask`` (0 or 1, [n]) and ``hidden_states``,
a list of K + 1 tensors [n, H]: K aux states, low layer first, then the last state.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle3.data.declaration import StoredDeclaration, read_declaration
from eagle3.data.hashing import hash_document
from eagle3.data.layout import LayoutError, Plane, StateLayout
from eagle3.data.masks import supervised_runs
from eagle3.data.pickle_values import Opaque
from eagle3.data.store import DocumentRecord
from eagle3.data.torch_zip import StoredTensor, TorchZip
from eagle3.errors import DataError

_FILE_NAME = re.compile(r"data_(\d+)\.pt")
_KEYS = "input_ids, loss_mask and hidden_states"
STATE_DTYPES = ("bfloat16", "float16", "float32", "float64")
_ID_DTYPES = ("int64", "int32", "uint16")
_MASK_DTYPES = (*_ID_DTYPES, "bool", "int16", "int8", "uint8", "float32", "float64")


class SpeculatorsV1:
    """The documents of one directory, in numeric order of i."""

    side_files: tuple[Path, ...] = ()

    def __init__(self, directory: Path, layout: StateLayout) -> None:
        self.directory = directory
        self.layout = layout
        self.files = list_documents(directory)
        size = layout.hidden_size
        self.planes = tuple(
            Plane(k * size, (k + 1) * size) for k in range(layout.num_aux_layers + 1)
        )

    def declaration(self) -> StoredDeclaration:
        """What ``data_config.json`` says."""
        return read_declaration(self.directory, self.layout.num_aux_layers)

    def probe(self, file: str) -> tuple[DocumentRecord]:
        """See :meth:`eagle3.data.store.Store.probe`."""
        path = self.directory / file
        with TorchZip(path) as archive:
            content = _content(archive)
            ids_at = _vector(content, "input_ids", path)
            ids = check_ids(_numbers(archive, ids_at, "input_ids"), self.layout, path)
            mask_at = _vector(content, "loss_mask", path)
            mask = check_mask(_numbers(archive, mask_at, "loss_mask"), len(ids), path)
            states = _states(content, len(ids), self.layout, path)
        runs = supervised_runs(mask)
        sample_hash, prompt_hash = hash_document(ids, runs)
        record = DocumentRecord(
            file=file,
            length=len(ids),
            runs=runs,
            sample_hash=sample_hash,
            prompt_hash=prompt_hash,
            dtype=states[0].dtype,
            ids_offset=ids_at.offset,
            ids_bytes=ids_at.itemsize,
            state_offsets=tuple([state.offset for state in states]),
        )
        return (record,)


def list_documents(directory: Path) -> tuple[str, ...]:
    """Names of the ``data_{i}.pt`` in numeric order; empty for a missing directory."""
    if not directory.is_dir():
        return ()
    with os.scandir(directory) as entries:
        found = [match for entry in entries if (match := _FILE_NAME.fullmatch(entry.name))]
    return tuple(m.group() for m in sorted(found, key=lambda m: (int(m.group(1)), m.group())))


def check_ids(ids: NDArray[Any], layout: StateLayout, path: Path) -> NDArray[Any]:
    """Token ids within the verifier's vocabulary; ``ids`` are int64, int32 or uint16.

    Raises:
        DataError: naming ``path``.
    """
    # Negative ids are large ones when read without a sign, so that one pass suffices.
    if len(ids) and int(ids.view(f"u{ids.itemsize}").max()) >= layout.vocab_size:
        raise DataError(
            f"{path}: key 'input_ids': found token ids {int(ids.min())}..{int(ids.max())}, "
            f"expected 0..{layout.vocab_size - 1} (model.vocab_size={layout.vocab_size}). Set "
            "model.vocab_size to the verifier's, or capture with the verifier's own tokenizer."
        )
    return ids


def check_mask(mask: NDArray[Any], num_tokens: int, path: Path) -> NDArray[np.bool_]:
    """Zeros and ones, one per token.

    Raises:
        DataError: naming ``path``.
    """
    where = f"{path}: key 'loss_mask'"
    if len(mask) != num_tokens:
        raise DataError(
            f"{where}: found length {len(mask)}, expected {num_tokens}, the length of input_ids. "
            "Capture the sample again."
        )
    ones = mask != 0
    if not bool((mask == ones).all()):
        raise DataError(
            f"{where}: found values other than 0 and 1, expected only these. "
            "Capture the sample again."
        )
    return ones


def _content(archive: TorchZip) -> dict[str, Any]:
    content = archive.content()
    if not isinstance(content, dict):
        raise DataError(
            f"{archive.path}: found {_kind(content)}, expected a dict with {_KEYS}. "
            "Is it a file of another format?"
        )
    if "hidden_states" not in content and {"hidden_state", "target"} <= content.keys():
        raise LayoutError(
            f"{archive.path}: found keys 'hidden_state' and 'target', the layout of speculators "
            f"v0, expected {_KEYS} as v1 has them. Convert each file: hidden_states = "
            "[*hidden_state.split(hidden_size, -1), target], every tensor made contiguous()."
        )
    return content


def _kind(value: Any) -> str:
    if isinstance(value, StoredTensor):
        return "a tensor"
    return value.name if isinstance(value, Opaque) else type(value).__name__


def _value(content: dict[str, Any], key: str, path: Path) -> Any:
    if key not in content:
        raise DataError(
            f"{path}: key '{key}' is missing: found {', '.join(map(str, content)) or 'no keys'}, "
            f"expected {_KEYS}. Is it a file of another format?"
        )
    return content[key]


def _vector(content: dict[str, Any], key: str, path: Path) -> StoredTensor:
    value = _value(content, key, path)
    if not isinstance(value, StoredTensor):
        raise DataError(
            f"{path}: key '{key}': found {_kind(value)}, expected a tensor [n]. "
            "Capture the sample again."
        )
    where = f"{path}: key '{key}'"
    return _contiguous(_unbatch(value, 1, where), where)


def _unbatch(value: StoredTensor, ndim: int, where: str) -> StoredTensor:
    """Drop a leading batch axis of exactly 1."""
    if len(value.shape) == ndim + 1 and value.shape[0] == 1:
        value = replace(value, shape=value.shape[1:], stride=value.stride[1:])
    if len(value.shape) != ndim:
        axes = "[n]" if ndim == 1 else "[n, H]"
        raise DataError(
            f"{where}: found shape {list(value.shape)}, expected {axes} or [1, {axes[1:]}. "
            "Store one document per file."
        )
    return value


def _contiguous(value: StoredTensor, where: str) -> StoredTensor:
    if not value.is_contiguous:
        raise DataError(
            f"{where}: found a view with strides {list(value.stride)}, expected rows one after "
            "another. Save tensor.contiguous() instead."
        )
    return value


def _numbers(archive: TorchZip, tensor: StoredTensor, key: str) -> NDArray[Any]:
    """The values of a vector of ids or of a mask."""
    if tensor.dtype not in (_ID_DTYPES if key == "input_ids" else _MASK_DTYPES):
        raise DataError(
            f"{archive.path}: key '{key}': found {tensor.dtype}, expected int64. "
            "Capture the sample again."
        )
    return np.frombuffer(archive.values(tensor), np.dtype(tensor.dtype).newbyteorder("<"))


def _states(
    content: dict[str, Any], num_tokens: int, layout: StateLayout, path: Path
) -> list[StoredTensor]:
    where = f"{path}: key 'hidden_states'"
    states = _value(content, "hidden_states", path)
    expected = layout.num_aux_layers + 1
    if isinstance(states, StoredTensor):
        raise LayoutError(
            f"{where}: found one stacked tensor {list(states.shape)}, expected a list of "
            f"{expected} tensors [n, H]: which axis counts layers is ambiguous. Save "
            "list(tensor.unbind(axis)) with the right axis instead."
        )
    if not isinstance(states, list) or not all(isinstance(s, StoredTensor) for s in states):
        kinds = ", ".join(sorted(set(map(_kind, states)))) if isinstance(states, list) else ""
        raise DataError(
            f"{where}: found {_kind(states)}{kinds and f' of {kinds}'}, expected a list of tensors."
        )
    if len(states) != expected:
        raise LayoutError(
            f"{where}: found {len(states)} tensors, expected {expected} "
            f"({layout.num_aux_layers} aux states and the last state). Set "
            f"model.num_aux_layers={max(len(states) - 1, 1)} if the directory was captured so."
        )
    checked = [_state(state, num_tokens, layout, f"{where}[{k}]") for k, state in enumerate(states)]
    dtypes = sorted({state.dtype for state in checked})
    if len(dtypes) > 1:
        raise DataError(
            f"{where}: found {' and '.join(dtypes)}, expected one dtype. Capture the sample again."
        )
    return checked


def _state(state: StoredTensor, num_tokens: int, layout: StateLayout, where: str) -> StoredTensor:
    if state.dtype not in STATE_DTYPES:
        raise DataError(
            f"{where}: found {state.dtype}, expected {', '.join(STATE_DTYPES)}. "
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
    return _contiguous(state, where)
