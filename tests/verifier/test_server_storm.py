"""All faults at once: every document is stored, once, with the engine's own states."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.document_files import save_document
from eagle3.names import ServerForm
from eagle3.tokens import TokenSequence
from eagle3.verifier.base import CapturedStates, describe_verifier
from eagle3.verifier.server import ServerVerifier
from eagle3.verifier.server_requests import ServerSettings
from eagle3.verifier.sglang import SglangPair, SglangSource
from eagle3.verifier.states import StatesSource
from eagle3.verifier.vllm import VllmSource
from tests.verifier.servers import (
    COUNT,
    DOCUMENTS,
    LAST_LAYERS,
    LAYERS,
    TRUTH,
    Fault,
    SglangServer,
    StatesServer,
    VllmServer,
    aux,
    serve,
    verifier_directory,
)

TIMEOUT_S = 0.5
STUBBORN = ServerSettings(in_flight=3, attempts=40, pause_s=0.0, poll_s=0.05, patience_s=30.0)
CONNECTION = ["500", "503", "silence", "slow", "reset", "half a reply", "missing", "other tokens"]
SGLANG = [*CONNECTION, "short", "ragged", "not a number", "null"]
VLLM = [*CONNECTION, "cut file", "no file", "never written"]
RESTARTS = (4, 11)
"""Of which requests."""


def storm(seed: int, faults: list[str]) -> Fault:
    """A fault for two requests in five, and two restarts."""
    draw = random.Random(seed)
    drawn = [draw.choice(faults) if draw.random() < 0.4 else None for _ in range(1000)]
    return lambda number: "restart" if number in RESTARTS else drawn[number % 1000]


@contextmanager
def sglang(directory: Path, _: Path, seed: int) -> Iterator[tuple[StatesSource, StatesServer]]:
    verifier = describe_verifier(directory)
    servers = [SglangServer("aux", storm(seed, SGLANG)), SglangServer("last", storm(-seed, SGLANG))]
    with ExitStack() as stack:
        one, two = (stack.enter_context(serve(server)).url for server in servers)
        timeout_s = TIMEOUT_S
        yield (
            SglangPair(
                SglangSource(one, verifier, ServerForm.sglang_aux, timeout_s=timeout_s),
                SglangSource(two, verifier, ServerForm.sglang_last, timeout_s=timeout_s),
            ),
            servers[0],
        )


@contextmanager
def vllm(directory: Path, work: Path, seed: int) -> Iterator[tuple[StatesSource, StatesServer]]:
    shared = work / "shared"
    shared.mkdir()
    server = VllmServer(shared, storm(seed, VLLM))
    try:
        with serve(server) as site:
            yield (
                VllmSource(
                    site.url,
                    describe_verifier(directory),
                    directory,
                    LAST_LAYERS,
                    shared,
                    server_path="/shared",
                    timeout_s=TIMEOUT_S,
                ),
                server,
            )
    finally:
        server.close()


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("engine", "last"), [(sglang, "post_norm"), (vllm, "pre_norm")], ids=["sglang", "vllm"]
)
def test_everything_is_stored_once_and_right(
    engine: Any, last: str, seed: int, tmp_path: Path
) -> None:
    directory = verifier_directory(tmp_path / "tiny")
    stored: list[int] = []
    with engine(directory, tmp_path, seed) as (source, server):
        model = ServerVerifier(directory, source, STUBBORN)
        assert model.offer.last_hidden == last
        for outcome, states in model.stream(DOCUMENTS, LAYERS, lambda _: None):
            assert states is not None, outcome.error
            stored.append(outcome.index)
            sequence = TokenSequence(tuple(DOCUMENTS[outcome.index].tolist()), 0)
            save_document(tmp_path / f"data_{outcome.index}.pt", sequence, states)
        assert len(server.sent) >= COUNT + len(RESTARTS), "the storm was felt"
    assert sorted(stored) == list(range(COUNT))
    for place in range(COUNT):
        content = torch.load(tmp_path / f"data_{place}.pt", weights_only=True)
        assert torch.equal(content["input_ids"], DOCUMENTS[place])
        found = CapturedStates(tuple(content["hidden_states"][:-1]), content["hidden_states"][-1])
        assert torch.equal(torch.stack(found.aux, 1), aux(place))
        assert torch.equal(found.last, TRUTH[f"{place}.{last}"])
