"""The verifier's token embedding, byte for byte or only some rows of it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle3.errors import VerifierError
from eagle3.model.weights import EMBED_NAMES

_INDEX = "model.safetensors.index.json"


def embedding_rows(
    directory: Path, ids: Int[Tensor, " N"] | None, shape: tuple[int, int]
) -> Float[Tensor, "N H"]:
    """Rows of the embedding in the dtype in which the verifier stores it.

    Args:
        directory: of the verifier.
        ids: verifier token ids; null: all rows, in order.
        shape: that the whole embedding must have.

    Raises:
        VerifierError: it is not there, quantised, or of another shape.
    """
    file, name = _find(directory)
    try:
        with safe_open(file, framework="pt") as handle:
            stored = handle.get_slice(name)
            found = tuple(stored.get_shape())
            if found != shape:
                raise VerifierError(
                    f"{file}: {name} is {list(found)}, expected {list(shape)}: give the verifier "
                    "that the drafter was trained for as paths.verifier"
                )
            if ids is None:
                rows: Tensor = stored[:]
            else:
                rows = torch.cat([stored[i : i + 1] for i in ids.tolist()])
    except (SafetensorError, OSError) as error:
        raise VerifierError(f"{file} cannot be read ({error}): copy it again") from error
    if not rows.is_floating_point() or rows.element_size() < 2:
        raise VerifierError(
            f"{file}: {name} is stored as {rows.dtype}, expected bfloat16, float16 or float32: a "
            "quantised embedding is not copied; leave it to the engine with embeddings=omit"
        )
    return rows


def _find(directory: Path) -> tuple[Path, str]:
    index = directory / _INDEX
    try:
        if index.is_file():
            stored = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {name: directory / file for name, file in stored.items()}
        else:
            files = {}
            for path in sorted(directory.glob("*.safetensors")):
                with safe_open(path, framework="pt") as handle:
                    files |= dict.fromkeys(handle.keys(), path)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise VerifierError(f"{directory} cannot be read ({error}): copy it again") from error
    for name in EMBED_NAMES:
        if name in files:
            return files[name], name
    raise VerifierError(
        f"{directory}: found none of {', '.join(EMBED_NAMES)}, expected the verifier's embedding: "
        "give its directory with *.safetensors as paths.verifier"
    )
