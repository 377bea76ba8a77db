"""States of many documents, one after another, from a model in this process or from a server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from eagle3.capturing.batches import plan_batches
from eagle3.capturing.documents import Document
from eagle3.verifier.base import CapturedStates, Verifier
from eagle3.verifier.server import ServerVerifier

Captured = tuple[int, CapturedStates | str]
"""Place of a document, and its states or the reason why there are none."""


def states_of(
    verifier: Verifier,
    documents: Sequence[Document],
    wanted: Iterable[int],
    *,
    aux_layer_ids: Sequence[int],
    batch_tokens: int,
    log: Callable[[str], None],
) -> Iterator[Captured]:
    """States of the documents at the places ``wanted``.

    Batches are planned over all ``documents``, so that a capture which goes on after a stop gives
    the same states to the last bit: rounding depends on the batch that a document is in.

    Raises:
        VerifierError: the verifier can give no states of any document.
        ServerError: the server is gone.
    """
    wanted = set(wanted)
    if isinstance(verifier, ServerVerifier):
        places = sorted(wanted)
        stream = verifier.stream((_ids(documents[p]) for p in places), aux_layer_ids, log)
        for outcome, states in stream:
            place = places[outcome.index]
            yield place, outcome.error if states is None else _checked(states)
        return
    for batch in plan_batches([len(document.ids) for document in documents], batch_tokens):
        if wanted.isdisjoint(batch):
            continue
        found = verifier.capture([_ids(documents[place]) for place in batch], aux_layer_ids)
        for place, states in zip(batch, found, strict=True):
            if place in wanted:
                yield place, _checked(states)


def _ids(document: Document) -> Tensor:
    return torch.tensor(document.ids)


def _checked(states: CapturedStates) -> CapturedStates | str:
    if all(bool(state.isfinite().all()) for state in (*states.aux, states.last)):
        return states
    return (
        f"NaN or inf among the states, computed in {states.last.dtype}, expected finite ones. "
        "Compute in float32 or bfloat16, and check the weights"
    )
