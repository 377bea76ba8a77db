"""The back end that the settings name, started when it is first needed."""

from __future__ import annotations

from pathlib import Path

import torch

from eagle3.capturing.plan import CapturePlan, required
from eagle3.errors import ConfigError
from eagle3.names import ServerForm
from eagle3.verifier.base import Generator, Verifier
from eagle3.verifier.huggingface import HuggingFaceVerifier
from eagle3.verifier.server import ServerVerifier
from eagle3.verifier.server_requests import ServerSettings
from eagle3.verifier.sglang import SglangPair, SglangSource
from eagle3.verifier.specforge import SpecForgeSource, connect_mooncake
from eagle3.verifier.states import StatesSource
from eagle3.verifier.vllm import VllmSource


class Engine:
    """Loads the model, or asks the server what it gives, once."""

    def __init__(self, plan: CapturePlan) -> None:
        self._plan = plan
        self._verifier: HuggingFaceVerifier | ServerVerifier | None = None

    def verifier(self) -> Verifier:
        """Who computes the states.

        Raises:
            VerifierError: a bad directory, missing packages, or a server that gives no states.
            ServerError: the server does not answer.
        """
        if self._verifier is None:
            plan = self._plan
            if plan.settings.server.url is None:
                dtype = getattr(torch, plan.settings.dtype)
                self._verifier = HuggingFaceVerifier(plan.verifier_dir, dtype, plan.device)
            else:
                self._verifier = _server(plan)
        return self._verifier

    def generator(self) -> Generator:
        """Who writes answers.

        Raises:
            ConfigError: the states come from a server.
        """
        verifier = self.verifier()
        if isinstance(verifier, ServerVerifier):
            raise ConfigError(
                "answers are to be written, and server.url is set: answers are written by a model "
                "in this process only. Give conversations with their answers and "
                "answers.regenerate=off, or leave server.url out"
            )
        assert isinstance(verifier, HuggingFaceVerifier)
        return verifier


def _server(plan: CapturePlan) -> ServerVerifier:
    server = plan.settings.server
    settings = ServerSettings(
        in_flight=server.in_flight, attempts=server.attempts, patience_s=server.patience_s
    )
    return ServerVerifier(plan.verifier_dir, _source(plan), settings)


def _source(plan: CapturePlan) -> StatesSource:
    server, verifier = plan.settings.server, plan.verifier
    url = required(server.url, "server.url", "the server's address").rstrip("/")
    dtype = getattr(torch, plan.settings.dtype)
    match server.form:
        case ServerForm.vllm_connector:
            shared = Path(required(server.shared, "server.shared", "where the server writes"))
            layers = (*plan.aux_layer_ids, verifier.num_layers)
            return VllmSource(
                url,
                verifier,
                plan.verifier_dir,
                layers,
                shared,
                server_path=server.shared_as,
                dtype=dtype,
                timeout_s=server.timeout_s,
            )
        case ServerForm.sglang_aux:
            last_url = required(server.last_url, "server.last_url", "a server of the last state")
            kinds = (ServerForm.sglang_aux, ServerForm.sglang_last)
            aux, last = (
                SglangSource(address, verifier, form, dtype=dtype, timeout_s=server.timeout_s)
                for address, form in zip((url, last_url.rstrip("/")), kinds, strict=True)
            )
            return SglangPair(aux, last)
        case ServerForm.sglang_spec_capture:
            store = connect_mooncake()
            return SpecForgeSource(url, verifier, store, dtype=dtype, timeout_s=server.timeout_s)
    raise ConfigError(
        f"server.form is {server.form}, expected sglang_aux with server.last_url, "
        "sglang_spec_capture, or vllm_connector: sglang_last gives one kind of states only"
    )
