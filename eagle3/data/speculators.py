"""Directories of speculators 0.9: states in safetensors, masks in the Arrow data set beside them.

::

    prepared/                            an Arrow data set: input_ids, loss_mask, seq_len
        state.json  data-00000-of-00001.arrow ...
        hidden_states/
            hs_17.safetensors            hidden_states [n, K + 1, H], token_ids int64 [n]; row 17

A token's states lie together, aux states first, so the states of a document are one plane. The
Arrow data set is found in the directory of the states, in its parent, or where the config says.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle3.data.arrow_rows import ArrowRows, is_arrow_directory
from eagle3.data.declaration import StoredDeclaration, read_declaration
from eagle3.data.hashing import hash_document
from eagle3.data.layout import LayoutError, Plane, StateLayout
from eagle3.data.masks import supervised_runs
from eagle3.data.safetensors_file import SafetensorsFile, StoredTensor
from eagle3.data.speculators_v1 import STATE_DTYPES, check_ids, check_mask
from eagle3.data.store import DocumentRecord
from eagle3.errors import DataError

_FILE_NAME = re.compile(r"hs_(\d+)\.safetensors")
_KEYS = ("hidden_states", "token_ids")
_HINT = (
    "speculators 0.9 counts the state entering layer k (entering) and stores the last state "
    "pre_norm, as the layer after the last one."
)


class Speculators:
    """The documents of one directory, in the order of their rows.

    Raises:
        DataError: the Arrow data set is not found or cannot be read.
    """

    def __init__(self, directory: Path, layout: StateLayout, arrow: Path | None = None) -> None:
        self.directory = directory
        self.layout = layout
        self.files = list_states(directory)
        self.planes = (Plane(0, layout.width),)
        self._rows = ArrowRows(find_arrow(directory, arrow))

    @property
    def side_files(self) -> tuple[Path, ...]:
        """The masks are here."""
        return self._rows.files

    def declaration(self) -> StoredDeclaration:
        """What ``data_config.json`` says; the writer itself leaves none."""
        found = read_declaration(self.directory, self.layout.num_aux_layers)
        return replace(found, hint=_HINT)

    def probe(self, file: str) -> tuple[DocumentRecord]:
        """See :meth:`eagle3.data.store.Store.probe`."""
        path = self.directory / file
        with SafetensorsFile(path) as stored:
            ids_at, states = _tensor(stored, "token_ids"), _tensor(stored, "hidden_states")
            _check_states(states, self.layout, path)
            ids = _token_ids(stored, ids_at)
        if len(ids) != states.shape[0]:
            raise DataError(
                f"{path}: key 'hidden_states': found {states.shape[0]} rows, expected {len(ids)}, "
                "the length of token_ids. Capture the sample again."
            )
        check_ids(ids, self.layout, path)
        runs = supervised_runs(self._mask(path, ids))
        sample_hash, prompt_hash = hash_document(ids, runs)
        record = DocumentRecord(
            file=file,
            length=len(ids),
            runs=runs,
            sample_hash=sample_hash,
            prompt_hash=prompt_hash,
            dtype=states.dtype,
            ids_offset=ids_at.offset,
            ids_bytes=8,
            state_offsets=(states.offset,),
        )
        return (record,)

    def _mask(self, path: Path, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """The mask of the row that this file belongs to, whose token ids must be the same."""
        number = _row_number(path.name)
        where = f"{self._rows.directory}, row {number}"
        if number >= len(self._rows):
            raise DataError(
                f"{path}: found no row for it in {self._rows.directory}, which has "
                f"{len(self._rows)}, expected row {number}. Set paths.arrow to the data set that "
                "was captured."
            )
        row = self._rows.row(number)
        if not np.array_equal(row.input_ids, ids):
            raise DataError(
                f"{path}: key 'token_ids': {_difference(ids, row.input_ids)} in {where}: the "
                "states belong to other tokens. Set paths.arrow to the data set that was captured, "
                "or capture the sample again."
            )
        return check_mask(row.loss_mask, len(ids), path)


def list_states(directory: Path) -> tuple[str, ...]:
    """Names of the ``hs_{i}.safetensors`` in numeric order; empty for a missing directory."""
    if not directory.is_dir():
        return ()
    found = [p.name for p in directory.iterdir() if _FILE_NAME.fullmatch(p.name)]
    return tuple(sorted(found, key=lambda name: (_row_number(name), name)))


def find_arrow(directory: Path, arrow: Path | None) -> Path:
    """The Arrow data set of a directory of states: ``arrow`` where it is given.

    Raises:
        DataError: it is not there.
    """
    places = [arrow] if arrow is not None else [directory, directory.resolve().parent]
    for place in places:
        if is_arrow_directory(place):
            return place
    raise DataError(
        f"{directory}: found hs_*.safetensors, but no Arrow data set (state.json) in "
        f"{' or '.join(str(place) for place in places)}; expected the one that was captured, "
        "because the loss masks are in it. Set paths.arrow to its directory."
    )


def _row_number(name: str) -> int:
    match = _FILE_NAME.fullmatch(name)
    assert match is not None
    return int(match.group(1))


def _tensor(stored: SafetensorsFile, key: str) -> StoredTensor:
    if key in stored.tensors:
        return stored.tensors[key]
    raise DataError(
        f"{stored.path}: key '{key}' is missing: found {', '.join(stored.tensors) or 'no keys'}, "
        f"expected {' and '.join(_KEYS)}. Is it a file of another format?"
    )


def _token_ids(stored: SafetensorsFile, tensor: StoredTensor) -> NDArray[np.int64]:
    if tensor.dtype != "int64" or len(tensor.shape) != 1:
        raise DataError(
            f"{stored.path}: key 'token_ids': found {tensor.dtype} {list(tensor.shape)}, expected "
            "int64 [n]. Capture the sample again."
        )
    return np.frombuffer(stored.read(tensor.offset, tensor.num_bytes), "<i8")


def _check_states(states: StoredTensor, layout: StateLayout, path: Path) -> None:
    where, shape = f"{path}: key 'hidden_states'", list(states.shape)
    if states.dtype.startswith("float8"):
        raise DataError(
            f"{where}: found {states.dtype}, expected {', '.join(STATE_DTYPES)}. States in 8 bits "
            "with scales are not read; capture without that compression."
        )
    if states.dtype not in STATE_DTYPES:
        raise DataError(
            f"{where}: found {states.dtype}, expected {', '.join(STATE_DTYPES)}. "
            "Capture the sample again."
        )
    layers = layout.num_aux_layers + 1
    if len(shape) != 3:
        raise LayoutError(
            f"{where}: found shape {shape}, expected [n, {layers}, {layout.hidden_size}]: tokens, "
            "layers, hidden size. Is it a file of another format?"
        )
    if shape[1] != layers:
        raise LayoutError(
            f"{where}: found shape {shape}, expected {layers} layers on the second axis "
            f"({layout.num_aux_layers} aux states and the last state). Set model.num_aux_layers="
            f"{max(shape[1] - 1, 1)} if the directory was captured so."
        )
    if shape[2] != layout.hidden_size:
        raise LayoutError(
            f"{where}: found hidden size {shape[2]}, expected {layout.hidden_size} "
            "(model.hidden_size). Set model.hidden_size to the verifier's, or use its captures."
        )


def _difference(ids: NDArray[np.int64], expected: NDArray[Any]) -> str:
    if len(ids) != len(expected):
        return f"found {len(ids)} tokens, expected {len(expected)} as"
    at = int(np.flatnonzero(ids != expected)[0])
    return f"found {int(ids[at])} at token {at}, expected {int(expected[at])} as"
