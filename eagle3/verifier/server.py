"""A running server as a verifier.

No engine gives everything. SGLang's replies carry the state *after* the final norm, vLLM's the one
before it. So ``CapturedStates.last`` of a server is what ``offer.last_hidden`` says, and whoever
stores it must store that too: ``offer.record()`` is made for the manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from eagle3.capture_progress import print_line
from eagle3.errors import VerifierError
from eagle3.verifier.base import CapturedStates, VerifierDescription, describe_verifier
from eagle3.verifier.server_requests import Outcome, ServerSettings, capture_documents
from eagle3.verifier.states import StatesOffer, StatesSource


class ServerVerifier:
    """A running server as a :class:`eagle3.verifier.base.Verifier`."""

    def __init__(
        self, directory: Path, source: StatesSource, settings: ServerSettings | None = None
    ) -> None:
        """Ask the server what it gives.

        Args:
            directory: The verifier's files: sizes and fingerprints come from here, and the server
                must run the same model.
            source: Of states.
            settings: Tries and limits.

        Raises:
            ServerError: the server does not answer.
            VerifierError: a bad directory, or the server lacks aux states or the last state.
        """
        self._description = describe_verifier(directory)
        self._source, self._settings = source, settings or ServerSettings()
        self.offer = source.offer()
        if not self.offer.aux_layer_ids or self.offer.last_hidden is None:
            missing = "last state" if self.offer.aux_layer_ids else "aux states"
            raise VerifierError(
                f"{self.offer.engine} {self.offer.version}, {self.offer.form}: gives no {missing}, "
                "expected aux states and the last one. Add a second server for the other kind "
                "(SglangPair), or use a form that gives both."
            )

    def describe(self) -> VerifierDescription:
        """Identity and sizes, from the directory."""
        return self._description

    def capture(
        self, token_ids: Sequence[Tensor], aux_layer_ids: Sequence[int]
    ) -> list[CapturedStates]:
        """States of a batch, in its order; ``last`` is as :attr:`offer` says.

        Raises:
            ServerError: the server does not answer.
            VerifierError: a layer that the server does not give, or a document without states.
        """
        found: list[CapturedStates | None] = [None] * len(token_ids)
        for outcome, states in self.stream(token_ids, aux_layer_ids):
            if states is None:
                raise VerifierError(f"document {outcome.index} of the batch: {outcome.error}")
            found[outcome.index] = states
        return [states for states in found if states is not None]

    def stream(
        self,
        token_ids: Iterable[Tensor],
        aux_layer_ids: Sequence[int],
        say: Callable[[str], None] = print_line,
    ) -> Iterator[tuple[Outcome, CapturedStates | None]]:
        """:func:`capture_documents` with the layers asked for; None where a document failed.

        Raises:
            ServerError: the server is gone.
            VerifierError: a layer that the server does not give, or other states than before.
        """
        places = _places(self.offer, aux_layer_ids)
        for outcome in capture_documents(self._source, token_ids, self._settings, say):
            states = outcome.states
            if states is None:
                yield outcome, None
                continue
            assert states.aux is not None, "offered"
            assert states.last is not None, "offered"
            aux = tuple(states.aux[:, place] for place in places)
            yield replace(outcome, states=None), CapturedStates(aux, states.last)


def _places(offer: StatesOffer, wanted: Sequence[int]) -> list[int]:
    missing = [k for k in wanted if k not in offer.aux_layer_ids]
    if missing:
        raise VerifierError(
            f"{offer.engine} {offer.version} gives the states entering layers "
            f"{list(offer.aux_layer_ids)}, not {missing}. Ask for what it gives, or start it for "
            f"{list(wanted)}."
        )
    return [offer.aux_layer_ids.index(k) for k in wanted]
