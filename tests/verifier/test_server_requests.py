"""Many documents at a time: tries, a server that restarts, and back-pressure."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from eagle3.errors import VerifierError
from eagle3.names import ServerForm
from eagle3.server_http import ServerError
from eagle3.verifier.base import VerifierDescription, describe_verifier
from eagle3.verifier.server_requests import Outcome, ServerSettings, capture_documents
from eagle3.verifier.sglang import SglangSource
from tests.verifier.servers import (
    COUNT,
    DOCUMENTS,
    SglangServer,
    Site,
    assert_states,
    aux,
    in_order,
    serve,
    verifier_directory,
)

QUICK = ServerSettings(in_flight=4, pause_s=0.01, poll_s=0.05, patience_s=20.0)
AUX = ServerForm.sglang_aux


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> VerifierDescription:
    return describe_verifier(verifier_directory(tmp_path_factory.mktemp("many") / "tiny"))


def source(site: Site, verifier: VerifierDescription) -> SglangSource:
    return SglangSource(site.url, verifier, AUX, timeout_s=20.0)


def collect(source: SglangSource, say: Any = lambda _: None) -> list[Outcome]:
    return in_order(capture_documents(source, DOCUMENTS, QUICK, say))


@pytest.mark.parametrize("fault", ["500", "short", "null", "reset", "400"])
def test_a_document_that_always_fails_is_listed_and_stops_nothing(
    fault: str, verifier: VerifierDescription
) -> None:
    class Broken(SglangServer):
        def post(self, content: dict[str, Any]) -> tuple[str | None, bytes]:
            found, body = super().post(content)
            if content["input_ids"] != DOCUMENTS[5].tolist():
                return found, body
            if fault in ("short", "null"):
                return None, body.replace(b"[[[", b"[[[null, " if fault == "null" else b"[[[0], [")
            return fault, body

    server = Broken("aux")
    with serve(server) as site:
        outcomes = collect(source(site, verifier))
    failed = [outcome for outcome in outcomes if outcome.states is None]
    assert [outcome.index for outcome in failed] == [5]
    tries = 1 if fault == "400" else QUICK.attempts
    assert failed[0].error.endswith(f"(try {tries} of {QUICK.attempts})")
    assert site.url in failed[0].error
    assert len(server.sent) == COUNT - 1 + tries


def test_a_server_that_never_succeeds_ends_the_capture(verifier: VerifierDescription) -> None:
    server = SglangServer("aux", lambda _: "500")
    with (
        serve(server) as site,
        pytest.raises(VerifierError, match=r"None of the first 8 documents.*status 500"),
    ):
        collect(source(site, verifier))


def test_a_wrong_address_ends_the_capture_at_once(verifier: VerifierDescription) -> None:
    server = SglangServer("aux", lambda _: "404")
    with (
        serve(server) as site,
        pytest.raises(VerifierError, match=r"status 404.*Check the address"),
    ):
        collect(source(site, verifier))
    assert len(server.sent) <= QUICK.in_flight + 1


@pytest.mark.parametrize("number", [1, 4, 9])
def test_a_restart_in_the_middle_loses_and_doubles_nothing(
    number: int, verifier: VerifierDescription
) -> None:
    server = SglangServer("aux", lambda n: "restart" if n == number else None)
    said: list[str] = []
    with serve(server) as site:
        found = collect(source(site, verifier), said.append)
    for place, outcome in enumerate(found):
        assert outcome.states is not None, outcome.error
        assert_states(outcome.states.aux, aux(place))
    assert [line.split(":")[0] for line in said[:1]] == ["server is down, waiting for it"]
    assert said[-1] == "server is back"


def test_a_server_back_with_other_layers_ends_the_capture(verifier: VerifierDescription) -> None:
    server = SglangServer("aux", lambda n: "restart" if n == 3 else None)
    server.delay_s = 0.02

    with serve(server) as site:
        site.restarted = lambda: server.args.update(return_aux_hidden_state_layer_ids=[1, 15, 29])
        found: list[Outcome] = []
        stream = capture_documents(source(site, verifier), DOCUMENTS, QUICK, lambda _: None)
        with pytest.raises(VerifierError, match=r"aux_layer_ids: .2, 16, 29., now .2, 16, 30."):
            found.extend(stream)
    assert all(outcome.states is not None for outcome in found), "stopped is not failed"


def test_nothing_is_handed_on_until_a_server_that_came_back_was_looked_at(
    verifier: VerifierDescription,
) -> None:
    """The second document gets its states from the new server before anybody saw its options."""
    answered = threading.Event()

    class SlowToTell(SglangServer):
        def facts(self, path: str) -> Any:
            if site.back.is_set():
                answered.wait(timeout=20)
                time.sleep(0.3)  # enough for states to be handed on, if nothing holds them back
            return super().facts(path)

        def states(self, content: dict[str, Any], place: int, fault: str | None) -> Any:
            if place == 1:
                answered.set()
            return super().states(content, place, fault)

    def documents() -> Iterator[Tensor]:
        yield DOCUMENTS[0]
        site.back.wait(timeout=20)
        yield DOCUMENTS[1]

    server = SlowToTell("aux", lambda n: "restart" if n == 1 else None)
    found: list[Outcome] = []
    with serve(server) as site:
        site.restarted = lambda: server.args.update(return_aux_hidden_state_layer_ids=[1, 15, 29])
        made = SglangSource(site.url, verifier, AUX)
        with pytest.raises(VerifierError, match=r"now .2, 16, 30."):
            found.extend(capture_documents(made, documents(), QUICK, lambda _: None))
    assert answered.is_set()
    assert found == []


def test_a_change_that_nobody_met_is_noticed_at_the_end(verifier: VerifierDescription) -> None:
    server = SglangServer("aux")
    with serve(server) as site:
        stream = capture_documents(source(site, verifier), DOCUMENTS, QUICK, lambda _: None)
        next(stream)
        server.args["quantization"] = "fp8"
        found: list[Outcome] = []
        with pytest.raises(VerifierError, match=r"quantization: None, now 'fp8'"):
            found.extend(stream)
    assert len(found) == COUNT - 1


def test_a_server_that_stays_away_ends_the_capture(verifier: VerifierDescription) -> None:
    server = SglangServer("aux", lambda n: "restart" if n == 3 else None)
    short = ServerSettings(in_flight=2, pause_s=0.01, poll_s=0.05, patience_s=0.2)
    with serve(server) as site:
        site.down_s = 1.5
        with pytest.raises(VerifierError, match=r"down since 0.2 s.*Start it again"):
            list(capture_documents(source(site, verifier), DOCUMENTS, short, lambda _: None))


def test_a_slow_disk_slows_the_requests(verifier: VerifierDescription) -> None:
    """Documents are taken one by one as outcomes are, and never more than the limit."""
    taken = 0

    def documents() -> Iterator[Tensor]:
        nonlocal taken
        for ids in DOCUMENTS:
            taken += 1
            yield ids

    server = SglangServer("aux")
    with serve(server) as site:
        settings = ServerSettings(in_flight=3)
        stream = capture_documents(source(site, verifier), documents(), settings)
        for stored, _ in enumerate(stream):
            assert taken <= stored + 3
    assert taken == COUNT
    assert server.most_at_once <= 3


def test_requests_are_in_flight_together(verifier: VerifierDescription) -> None:
    together = threading.Barrier(4)

    class Meeting(SglangServer):
        def states(self, content: dict[str, Any], place: int, fault: str | None) -> Any:
            if len(content["input_ids"]) in (1, 2, 3, 5):
                together.wait(timeout=20)  # the first four documents; breaks if they are not
            return super().states(content, place, fault)

    settings = ServerSettings(in_flight=4)
    with serve(Meeting("aux")) as site:
        found = list(
            capture_documents(
                source(site, verifier),
                DOCUMENTS,
                settings,
                lambda _: None,
            )
        )
    assert len(found) == COUNT
    assert not together.broken


def test_a_capture_that_is_left_early_ends_its_requests(verifier: VerifierDescription) -> None:
    server = SglangServer("aux")
    with serve(server) as site:
        stream = capture_documents(source(site, verifier), DOCUMENTS, QUICK)
        next(stream)
        stream.close()
        sent = len(server.sent)
        assert sent <= QUICK.in_flight
        assert not [t for t in threading.enumerate() if t.name.startswith("states")]


def test_nobody_at_the_address(verifier: VerifierDescription) -> None:
    nobody = SglangSource("http://127.0.0.1:9", verifier, AUX)
    with pytest.raises(ServerError, match="no answer"):
        list(capture_documents(nobody, DOCUMENTS, QUICK))
