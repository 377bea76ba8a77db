"""States from vLLM's connector: files that are still being written when the reply comes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.errors import VerifierError
from eagle3.names import LastHidden
from eagle3.server_http import ServerError
from eagle3.verifier.base import VerifierDescription, describe_verifier
from eagle3.verifier.server import ServerVerifier
from eagle3.verifier.server_requests import Outcome, ServerSettings, capture_documents
from eagle3.verifier.vllm import VllmSource
from tests.verifier.servers import (
    CONTENT,
    COUNT,
    DOCUMENTS,
    LAST_LAYERS,
    LAYERS,
    TRUTH,
    Fault,
    Site,
    VllmServer,
    assert_states,
    aux,
    in_order,
    serve,
    verifier_directory,
)

TIMEOUT_S = 20.0
IMPATIENT_S = 1.0
"""Where a server is to be silent, or never to write."""
QUICK = ServerSettings(in_flight=4, pause_s=0.01, poll_s=0.05, patience_s=20.0)
PASSING = [
    "500",
    "silence",
    "slow",
    "half a reply",
    "reset",
    "missing",
    "cut file",
    "no file",
    "never written",
    "other tokens",
]

LOST_REPLY = ("500", "silence", "half a reply", "reset", "missing")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return verifier_directory(tmp_path_factory.mktemp("vllm") / "tiny")


@pytest.fixture(scope="module")
def verifier(directory: Path) -> VerifierDescription:
    return describe_verifier(directory)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    found = tmp_path / "shared"
    found.mkdir()
    return found


@pytest.fixture
def server(shared: Path) -> Iterator[VllmServer]:
    made = VllmServer(shared)
    yield made
    made.close()


def source(site: Site, server: VllmServer, directory: Path, **more: Any) -> VllmSource:
    settings: dict[str, Any] = {"server_path": "/shared", "timeout_s": TIMEOUT_S, **more}
    layers = settings.pop("layer_ids", LAST_LAYERS)
    return VllmSource(
        site.url, describe_verifier(directory), directory, layers, server.shared, **settings
    )


def collect(
    server: VllmServer, directory: Path, fault: Fault = lambda _: None, timeout_s: float = TIMEOUT_S
) -> list[Outcome]:
    server.fault = fault
    with serve(server) as site:
        made = source(site, server, directory, timeout_s=timeout_s)
        return in_order(capture_documents(made, DOCUMENTS, QUICK, lambda _: None))


def check_all(outcomes: list[Outcome]) -> None:
    for place, outcome in enumerate(outcomes):
        assert outcome.states is not None, outcome.error
        assert_states(outcome.states.aux, aux(place))
        assert_states(outcome.states.last, TRUTH[f"{place}.pre_norm"])


def test_states_are_the_connectors_and_nothing_stays_behind(
    server: VllmServer, directory: Path
) -> None:
    check_all(collect(server, directory))
    assert list(server.shared.iterdir()) == []
    assert all(sent["max_tokens"] == 1 for sent in server.sent)
    assert not any(sent["add_special_tokens"] for sent in server.sent)


def test_a_file_is_read_when_its_writer_lets_go(server: VllmServer, directory: Path) -> None:
    """The reply comes well before the file; without the lock there would be nothing to read."""
    server.write_s = 0.15
    check_all(collect(server, directory))
    assert len(server.sent) == COUNT, "no document took a second try"


def test_it_is_a_verifier_with_states_before_the_norm(
    server: VllmServer, directory: Path, verifier: VerifierDescription
) -> None:
    with serve(server) as site:
        model = ServerVerifier(directory, source(site, server, directory), QUICK)
        found = model.capture(DOCUMENTS, LAYERS)
    assert model.describe() == verifier
    for place, states in enumerate(found):
        assert torch.equal(torch.stack(states.aux, 1), aux(place))
        assert torch.equal(states.last, TRUTH[f"{place}.pre_norm"])
    record = model.offer.record()
    assert (record["engine"], record["version"]) == ("vLLM", CONTENT["vllm"]["version"])
    assert record["last_hidden"] == LastHidden.pre_norm
    assert tuple(record["aux_layer_ids"]) == LAYERS


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "multimodal"])
def test_latent_attention_is_said_to_be_unproven(
    nested: bool, server: VllmServer, directory: Path, tmp_path: Path
) -> None:
    more = {"kv_lora_rank": 512}
    sizes = {"hidden_size": 8, "num_hidden_layers": 32, "vocab_size": 50, "rms_norm_eps": 1e-6}
    changes: dict[str, Any] = {"text_config": {**sizes, **more}} if nested else more
    latent = verifier_directory(tmp_path / "latent", **changes)
    with serve(server) as site:
        assert "unproven" in source(site, server, latent).offer().record()["notes"][0]
        assert "unproven" not in str(source(site, server, directory).offer().notes)


@pytest.mark.parametrize("fault", PASSING)
def test_a_passing_fault_costs_a_try_and_no_document(
    fault: str, server: VllmServer, directory: Path
) -> None:
    timeout_s = IMPATIENT_S if fault in ("silence", "never written") else TIMEOUT_S
    planned: Fault = lambda number: fault if number in (2, 6) else None  # noqa: E731
    check_all(collect(server, directory, planned, timeout_s))
    assert len(server.sent) == COUNT + (0 if fault == "slow" else 2)
    server.close()
    left = list(server.shared.iterdir())
    # A reply that never arrives names no file, so its file stays: two of them and their locks.
    assert len(left) == (4 if fault in LOST_REPLY else 0)


@pytest.mark.parametrize("number", [1, 5])
def test_a_restart_in_the_middle_loses_and_doubles_nothing(
    number: int, server: VllmServer, directory: Path
) -> None:
    check_all(collect(server, directory, lambda n: "restart" if n == number else None))


def test_a_server_without_the_connector_is_named(server: VllmServer, directory: Path) -> None:
    said = r"None of the first 8.*ExampleHiddenStatesConnector"
    with pytest.raises(VerifierError, match=said):
        collect(server, directory, lambda _: "missing")


@pytest.mark.parametrize(
    ("layer_ids", "said"),
    [
        (LAYERS, "expected ascending ones that end with 32"),
        ((29, 16, 2, 32), "expected ascending"),
        ((32,), "expected ascending"),
        ((-1, 32), "expected ascending"),
    ],
    ids=["no_last_state", "disorder", "only_last", "negative"],
)
def test_layer_ids_without_a_last_state_are_refused(
    layer_ids: tuple[int, ...], said: str, server: VllmServer, directory: Path
) -> None:
    with serve(server) as site, pytest.raises(VerifierError, match=said):
        source(site, server, directory, layer_ids=layer_ids)


def test_a_server_started_with_other_layers_is_noticed(server: VllmServer, directory: Path) -> None:
    with serve(server) as site:
        made = source(site, server, directory, layer_ids=(2, 16, 32))
        with pytest.raises(VerifierError, match="expected 3 layers in bfloat16"):
            list(capture_documents(made, DOCUMENTS, QUICK))


def test_another_type_than_said_is_noticed(server: VllmServer, directory: Path) -> None:
    with serve(server) as site:
        made = source(site, server, directory, dtype=torch.float16)
        with pytest.raises(VerifierError, match="4 layers in float16"):
            list(capture_documents(made, DOCUMENTS, QUICK))


def test_only_files_of_the_shared_directory_are_touched(
    server: VllmServer, directory: Path, tmp_path: Path
) -> None:
    """A path in a reply is removed after reading, so it may not lead elsewhere."""
    kept = tmp_path / "kept.safetensors"
    kept.write_bytes(b"of somebody else")

    class Elsewhere(VllmServer):
        def states(self, content: dict[str, Any], place: int, fault: str | None) -> Any:
            return {"kv_transfer_params": {"hidden_states_path": f"/shared/../{kept.name}"}}

    with serve(Elsewhere(server.shared)) as site:
        made = source(site, server, directory)
        with pytest.raises(VerifierError, match="Say how the server calls its shared_storage_path"):
            made.prefill(DOCUMENTS[0])
    assert kept.read_bytes() == b"of somebody else"


def test_a_directory_that_is_not_mounted_is_named(directory: Path, tmp_path: Path) -> None:
    missing = VllmServer(tmp_path / "missing")
    with serve(missing) as site, pytest.raises(VerifierError, match="no such directory"):
        source(site, missing, directory)


def test_another_engine_is_no_vllm(server: VllmServer, directory: Path) -> None:
    class Other(VllmServer):
        def facts(self, path: str) -> Any:
            return {}

    with (
        serve(Other(server.shared)) as site,
        pytest.raises(ServerError, match="does not name its version and model"),
    ):
        source(site, server, directory).offer()
