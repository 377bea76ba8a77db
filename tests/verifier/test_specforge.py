"""States through SpecForge's capture request: shapes in the reply, bytes in a store."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.errors import VerifierError
from eagle3.names import LastHidden
from eagle3.verifier.base import describe_verifier
from eagle3.verifier.server import ServerVerifier
from eagle3.verifier.server_requests import Outcome, ServerSettings, capture_documents
from eagle3.verifier.specforge import SpecForgeSource, connect_mooncake
from tests.verifier.servers import (
    COUNT,
    DOCUMENTS,
    LAYERS,
    TRUTH,
    assert_states,
    aux,
    in_order,
    serve,
    verifier_directory,
)
from tests.verifier.specforge_server import CaptureServer

TIMEOUT_S = 20.0
QUICK = ServerSettings(in_flight=4, pause_s=0.01, poll_s=0.05)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return verifier_directory(tmp_path_factory.mktemp("specforge") / "tiny")


def collect(server: CaptureServer, directory: Path) -> list[Outcome]:
    with serve(server) as site:
        made = SpecForgeSource(
            site.url, describe_verifier(directory), server.objects, timeout_s=TIMEOUT_S
        )
        return in_order(capture_documents(made, DOCUMENTS, QUICK, lambda _: None))


def check_all(outcomes: list[Outcome]) -> None:
    for place, outcome in enumerate(outcomes):
        assert outcome.states is not None, outcome.error
        assert_states(outcome.states.aux, aux(place))
        assert_states(outcome.states.last, TRUTH[f"{place}.post_norm"])


@pytest.mark.parametrize("wrapped", [False, True], ids=["result", "list_of_one"])
def test_states_are_those_of_the_store_and_none_stays_pinned(
    wrapped: bool, directory: Path
) -> None:
    server = CaptureServer(wrapped=wrapped)
    check_all(collect(server, directory))
    assert server.objects.held == {}
    assert all(sent["spec_capture"]["replace"] for sent in server.sent)


@pytest.mark.parametrize(
    "fault", ["500", "reset", "half a reply", "short", "lost object", "sink error", "missing"]
)
def test_a_passing_fault_costs_a_try_and_leaves_no_object(fault: str, directory: Path) -> None:
    server = CaptureServer(lambda number: fault if number in (2, 6) else None)
    check_all(collect(server, directory))
    assert len(server.sent) == COUNT + 2
    assert server.objects.held == {}


def test_a_document_that_is_there_twice_comes_twice(directory: Path) -> None:
    server = CaptureServer()
    twice = [DOCUMENTS[3]] * 6
    with serve(server) as site:
        made = SpecForgeSource(site.url, describe_verifier(directory), server.objects)
        # Equal documents share a name in the store, so one may find its object removed and retry.
        stubborn = ServerSettings(in_flight=3, attempts=40, pause_s=0.001)
        model = ServerVerifier(directory, made, stubborn)
        found = model.capture(twice, LAYERS)
    assert model.offer.last_hidden is LastHidden.post_norm
    assert "read and not run" in model.offer.notes[0]
    assert len(found) == len(twice)
    for states in found:
        assert torch.equal(torch.stack(states.aux, 1), aux(3))


def test_other_layers_than_the_server_was_started_with(directory: Path) -> None:
    server = CaptureServer(lambda number: "other layers" if number == 3 else None)
    with pytest.raises(VerifierError, match=r"captured layers .5, 6, 7., expected .1, 15, 28."):
        collect(server, directory)


@pytest.mark.parametrize(
    ("key", "value"), [("enable_spec_capture", False), ("spec_capture_method", "dflash")]
)
def test_a_server_without_the_patch_is_refused_with_the_option(
    key: str, value: Any, directory: Path
) -> None:
    server = CaptureServer()
    server.args[key] = value
    with pytest.raises(VerifierError, match="--enable-spec-capture --spec-capture-method eagle3"):
        collect(server, directory)


@pytest.mark.skipif(importlib.util.find_spec("mooncake") is not None, reason="it is installed")
def test_a_missing_client_is_named() -> None:
    with pytest.raises(VerifierError, match="pip install mooncake-transfer-engine"):
        connect_mooncake()
