"""What a server that hands out states offers, and the form in which one document arrives.

A source (:mod:`eagle3.verifier.sglang`, :mod:`eagle3.verifier.specforge`,
:mod:`eagle3.verifier.vllm`) makes one try for one document;
:mod:`eagle3.verifier.server_requests` makes many.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from eagle3.errors import VerifierError
from eagle3.names import LastHidden, LayerIdConvention
from eagle3.server_http import ServerError


@dataclass(frozen=True)
class StatesOffer:
    """What a running server hands out."""

    engine: str
    version: str
    form: str
    """Name of the engine's feature that is used."""
    model: str
    """As the server calls it."""
    dtype: str
    """Of the states, named as in torch."""
    quantization: str | None
    """Of the weights, as the server says; None: none, or not said."""
    aux_layer_ids: tuple[int, ...]
    """*entering* convention, ascending, in the order of the states; empty: no aux states."""
    server_layer_ids: tuple[int, ...] | None
    """The ids that the server was started with; None: it chose them."""
    last_hidden: LastHidden | None
    """None: no last state."""
    notes: tuple[str, ...] = ()
    """What is not proven, for people and the manifest."""

    def record(self) -> dict[str, Any]:
        """All of it in plain values, for a manifest."""
        return {**asdict(self), "layer_id_convention": str(LayerIdConvention.entering)}


@dataclass(frozen=True)
class Prefilled:
    """States of one document of n tokens, on the CPU, as one reply gave them."""

    aux: Tensor | None
    """[n, K, H]"""
    last: Tensor | None
    """[n, H]"""


class StatesSource(Protocol):
    """One way of asking one engine for states."""

    def offer(self) -> StatesOffer:
        """Ask the server what it gives.

        Raises:
            ServerError: it does not answer.
            VerifierError: it is not set up to give states; says how to start it.
        """
        ...

    def prefill(self, token_ids: Tensor) -> Prefilled:
        """One try for one document; called from many threads.

        Raises:
            ServerError: no reply, or a wrong one; another try may do.
            VerifierError: no further try would do, for any document.
        """
        ...


def checked_states(
    states: Tensor, shape: tuple[int, ...], dtype: torch.dtype, place: str, hint: str
) -> Tensor:
    """States as the server computed them, after all checks.

    Args:
        states: From a reply, in ``dtype`` or in a wider type that was only the way.
        shape: Expected.
        dtype: In which the server computes.
        place: The address, for messages.
        hint: What usually makes the shape wrong.

    Raises:
        ServerError: another shape, NaN or inf.
        VerifierError: values that ``dtype`` cannot hold: the server computes in another one.
    """
    if tuple(states.shape) != shape:
        raise ServerError(
            f"{place}: states of shape {list(states.shape)}, expected {list(shape)}. {hint}"
        )
    if not bool(states.isfinite().all()):
        raise ServerError(f"{place}: NaN or inf among the states, expected finite ones")
    narrow = states.to(dtype)
    if not torch.equal(narrow.to(states.dtype), states):
        raise VerifierError(
            f"{place}: values that {dtype_name(dtype)} cannot hold, so the server computes in "
            "another type. Say the type that it was started with."
        )
    return narrow


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16``"""
    return str(dtype).removeprefix("torch.")
