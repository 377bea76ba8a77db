"""One captured document, one file: written whole or not at all, recognised when it is whole."""

from __future__ import annotations

from pathlib import Path

import torch

from eagle3.capture_config import STORED_DTYPE, CaptureRequest
from eagle3.errors import VerifierError
from eagle3.tokens import SupervisedIds
from eagle3.verifier.base import CapturedStates

_FILE_OVERHEAD_BYTES = 6144


def stored_bytes(num_tokens: int, num_documents: int, request: CaptureRequest) -> int:
    """Forecast of the files' size."""
    num_states = len(request.aux_layer_ids) + 1
    state_bytes = num_states * request.verifier.hidden_size * STORED_DTYPE.itemsize
    id_and_mask_bytes = 2 * torch.int64.itemsize
    return num_tokens * (state_bytes + id_and_mask_bytes) + num_documents * _FILE_OVERHEAD_BYTES


def save_document(path: Path, sequence: SupervisedIds, states: CapturedStates) -> None:
    """Write ``input_ids``, ``loss_mask`` and ``hidden_states``, then rename into place.

    Raises:
        VerifierError: NaN or inf among the states.
    """
    found = (*states.aux, states.last)
    if not all(bool(state.isfinite().all()) for state in found):
        raise VerifierError(
            f"{path}: not written, NaN or inf among the states, computed in {states.last.dtype}. "
            "Expected finite states; compute in float32 or bfloat16, and check the weights."
        )
    content = {
        "input_ids": torch.tensor(sequence.ids),
        "loss_mask": torch.tensor(sequence.loss_mask),
        # Copies with storages of their own: saving a view would write the whole batch behind it.
        "hidden_states": [state.to("cpu", STORED_DTYPE, copy=True) for state in found],
    }
    temporary = path.with_name(f".{path.name}.tmp")
    torch.save(content, temporary)
    temporary.replace(path)


def remove_leftovers(directory: Path) -> None:
    """Remove half-written files of a process that was killed."""
    for leftover in directory.glob(".data_*.tmp"):
        leftover.unlink()


def is_whole(path: Path, sequence: SupervisedIds, request: CaptureRequest) -> bool:
    """Whether ``path`` holds this document's states; reads the token ids only."""
    if not path.exists():
        return False
    try:
        content = torch.load(path, weights_only=True, mmap=True)
        states = content["hidden_states"]
        shapes = {tuple(state.shape) for state in states}
        return (
            tuple(content["input_ids"].tolist()) == sequence.ids
            and len(states) == len(request.aux_layer_ids) + 1
            and shapes == {(len(sequence.ids), request.verifier.hidden_size)}
        )
    except Exception:  # a cut file fails anywhere in the unpickler; it is captured again
        return False
