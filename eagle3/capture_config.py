"""``data_config.json`` of a captured directory: what the states are, and whose capture it is.

The file has the layout that speculators v0.3 gives it, with what that leaves open added:
``hidden_states.layer_id_convention``, ``hidden_states.last_hidden`` and fingerprints. It is
written last, so its presence marks a complete capture. Until then ``.capture.json`` holds the same
content, so that files of two captures never mix.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import eagle3
from eagle3.errors import DataError
from eagle3.names import LastHidden, LayerIdConvention
from eagle3.verifier.base import VerifierDescription

CONFIG_NAME = "data_config.json"
STARTED_NAME = ".capture.json"
STORED_DTYPE = torch.bfloat16
_IDENTITY = {
    "model": ("hidden_size", "tokenizer_fingerprint", "weights_fingerprint", "dtype"),
    "data": ("num_samples", "token_hash"),
    "hidden_states": ("layer_ids", "layer_id_convention", "last_hidden", "dtype"),
}
_PACKAGES = ("torch", "transformers", "safetensors")


@dataclass(frozen=True)
class CaptureRequest:
    """What one capture computes; two equal requests give the same files."""

    verifier_dir: Path
    verifier: VerifierDescription
    aux_layer_ids: tuple[int, ...]
    """*entering* convention."""
    dtype: torch.dtype
    """Of the computation; states are stored in bfloat16."""
    num_samples: int
    num_tokens: int
    token_hash: str
    source: str
    """Where the token ids came from, for people."""


def config_content(request: CaptureRequest) -> dict[str, Any]:
    """The content of ``data_config.json``."""
    verifier = request.verifier
    num_states, stored = len(request.aux_layer_ids) + 1, _dtype_name(STORED_DTYPE)
    return {
        "version": "2.0",
        "generated_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "reproducibility": {
            "command": " ".join(sys.argv),
            "package_versions": {"eagle3": eagle3.__version__, **_package_versions()},
        },
        "model": {
            "target_model_path": str(request.verifier_dir),
            "hidden_size": verifier.hidden_size,
            "num_layers": verifier.num_layers,
            "vocab_size": verifier.vocab_size,
            "rms_norm_eps": verifier.rms_norm_eps,
            "tokenizer_fingerprint": verifier.tokenizer_fingerprint,
            "weights_fingerprint": verifier.weights_fingerprint,
            "dtype": _dtype_name(request.dtype),
        },
        "data": {
            "train_data_path": request.source,
            "num_samples": request.num_samples,
            "num_tokens": request.num_tokens,
            "token_hash": request.token_hash,
        },
        "hidden_states": {
            "layer_ids": list(request.aux_layer_ids),
            "layer_id_convention": str(LayerIdConvention.entering),
            "last_hidden": str(LastHidden.pre_norm),
            "dtype": stored,
            "description": (
                "One tensor per layer id, the residual stream entering that layer, then the "
                "residual stream entering the final norm"
            ),
        },
        "format": {
            "file_pattern": "data_{idx}.pt",
            "data_format_version": 1,
            "schema": {
                "input_ids": {"dtype": "int64", "shape": "[n]", "description": "token ids"},
                "loss_mask": {
                    "dtype": "int64",
                    "shape": "[n]",
                    "description": "1 on response tokens",
                },
                "hidden_states": {
                    "dtype": stored,
                    "shape": f"list of {num_states} tensors [n, {verifier.hidden_size}]",
                    "description": "aux states low layer first, then the last state",
                },
            },
        },
    }


def read_existing(directory: Path) -> dict[str, Any] | None:
    """What a complete or an interrupted capture wrote here; None where there is neither.

    Raises:
        DataError: there are documents without a word about them, or the file is broken.
    """
    for name in (CONFIG_NAME, STARTED_NAME):
        path = directory / name
        if path.exists():
            try:
                content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise DataError(
                    f"{path}: not valid JSON ({error}). Remove the directory, or capture into "
                    "another one."
                ) from error
            return content
    if any(directory.glob("data_*.pt")):
        raise DataError(
            f"{directory}: found data_*.pt but no {CONFIG_NAME}, so whose states they are is "
            "unknown. Expected an empty directory, or one of an earlier capture. Choose another "
            "directory."
        )
    return None


def check_same_capture(directory: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise :class:`DataError` that lists both sides if ``directory`` holds another capture."""
    differences = []
    for section, keys in _IDENTITY.items():
        for key in keys:
            there, here = found.get(section, {}).get(key), wanted[section][key]
            if there != here:
                differences.append(f"  {section}.{key}: found {there!r}, wanted {here!r}")
    if differences:
        lines = "\n".join(differences)
        raise DataError(
            f"{directory} holds another capture than the one asked for:\n{lines}\n"
            "Set paths.shards to another directory, remove this one, or ask for what it holds."
        )


def write_config(path: Path, content: dict[str, Any]) -> None:
    """Write at once: a reader sees the whole file or none."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _package_versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
