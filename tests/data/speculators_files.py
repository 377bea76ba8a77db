"""Directories as speculators 0.9 leaves them: states by safetensors, masks by ``datasets``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from safetensors.torch import save_file

Document = dict[str, Any]


def write_states(directory: Path, number: int, document: Document) -> Path:
    """``hs_{number}.safetensors`` of one document."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"hs_{number}.safetensors"
    states = torch.stack(document["hidden_states"], dim=1)
    save_file({"hidden_states": states, "token_ids": document["input_ids"]}, path)
    return path


def write_arrow(
    directory: Path, documents: Sequence[Document], files: int = 1, **columns: Any
) -> Path:
    """A data set saved to disk: one row a document, in ``files`` stream files of small batches.

    ``columns`` replaces columns, or leaves out those that are None.
    """
    directory.mkdir(parents=True, exist_ok=True)
    table: dict[str, Any] = {
        "input_ids": pa.array(
            [document["input_ids"].tolist() for document in documents], pa.list_(pa.int32())
        ),
        "loss_mask": [document["loss_mask"].tolist() for document in documents],
        "seq_len": [len(document["input_ids"]) for document in documents],
    } | columns
    features = {name: {"_type": "Value", "dtype": "int64"} for name in table}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    rows = pa.table({name: values for name, values in table.items() if values is not None})
    rows = rows.replace_schema_metadata(metadata)
    names = [f"data-{i:05d}-of-{files:05d}.arrow" for i in range(files)]
    for i, name in enumerate(names):
        first, stop = (len(documents) * k // files for k in (i, i + 1))
        with pa.ipc.new_stream(str(directory / name), rows.schema) as writer:
            writer.write_table(rows.slice(first, stop - first), max_chunksize=2)
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "0123456789abcdef",
        "_format_columns": ["input_ids", "loss_mask", "seq_len"],
        "_format_kwargs": {},
        "_format_type": "torch",
        "_output_all_columns": False,
        "_split": None,
    }
    (directory / "state.json").write_text(json.dumps(state, indent=2, sort_keys=True))
    (directory / "dataset_info.json").write_text(json.dumps({"features": features}))
    return directory


def write_capture(prepared: Path, documents: Sequence[Document]) -> Path:
    """A data set and, in ``hidden_states`` inside it, the states of all its rows."""
    write_arrow(prepared, documents, files=2)
    for number, document in enumerate(documents):
        write_states(prepared / "hidden_states", number, document)
    return prepared / "hidden_states"
