"""What a run records for a later export, when verifier and shards may be out of reach."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle3.data.native_manifest import MANIFEST_NAME, read_manifest
from eagle3.model.weights import read_verifier_config

_BUCKETS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


@dataclass(frozen=True)
class VerifierIdentity:
    """Which model is served."""

    name: str
    """Hub name where its files say it, else its directory's name."""
    architecture: str | None
    """Class that engines choose by; null: its ``config.json`` does not say it."""
    num_layers: int
    quantization: str | None
    """Of the weights that were captured from."""


def recorded_verifier(directory: Path) -> VerifierIdentity:
    """Read a verifier's ``config.json``.

    Raises:
        VerifierError: it is missing or no configuration of a causal model.
    """
    layers = read_verifier_config(directory).num_layers
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    quantization = config.get("quantization_config") or {}
    architectures = config.get("architectures") or [None]
    return VerifierIdentity(
        name=str(config.get("_name_or_path") or directory.resolve().name),
        architecture=architectures[0],
        num_layers=layers,
        quantization=quantization.get("quant_method"),
    )


def recorded_lengths(lengths: NDArray[np.int64], max_seq_len: int) -> dict[str, Any]:
    """Plain values: the longest context that is trained, and how many documents are how long.

    Args:
        lengths: int64 [D], tokens of each training document.
        max_seq_len: rows of a pack; a document of n tokens has n - 1 rows.
    """
    longest = int(lengths.max(initial=0))
    places = np.searchsorted(_BUCKETS, lengths, side="left")
    counts = np.bincount(places, minlength=len(_BUCKETS) + 1).tolist()
    names = [f"up to {limit}" for limit in _BUCKETS] + [f"over {_BUCKETS[-1]}"]
    return {
        "documents": len(lengths),
        "longest_document": longest,
        "longest_trained": min(longest, max_seq_len + 1),
        "histogram": {name: n for name, n in zip(names, counts, strict=True) if n},
    }


def export_facts(
    verifier: Path, shards: Sequence[Path], lengths: NDArray[np.int64], max_seq_len: int
) -> dict[str, Any]:
    """All of it, as plain values for a checkpoint."""
    manifests = [read_manifest(path) for path in shards if (path / MANIFEST_NAME).is_file()]
    return {
        "verifier": asdict(recorded_verifier(verifier)),
        "captured_from": [asdict(manifest.verifier) for manifest in manifests],
        "lengths": recorded_lengths(lengths, max_seq_len),
    }
