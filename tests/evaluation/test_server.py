"""Acceptance of a running server, from replies that the engines' own code has made."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from eagle3.conversations.messages import Conversation
from eagle3.evaluation.config import ServerConfig
from eagle3.evaluation.diagnosis import CAUSES, diagnosis
from eagle3.evaluation.server import ServerFigures, measure
from eagle3.server_http import ServerError
from tests.evaluation.servers import REPLIES, FakeServer, Fault, serve

ROUNDS: list[list[int]] = REPLIES["rounds"]
PASSES, ACCEPTED = len(ROUNDS), sum(accepted for accepted, _ in ROUNDS)
QUICK = ServerConfig(timeout_s=5.0, attempts=2, in_flight=2, max_new_tokens=16)


def conversations(count: int) -> list[Conversation]:
    return [
        Conversation(({"role": "user", "content": f"Question {n}"},), place=f"line {n}")
        for n in range(count)
    ]


def judge(server: FakeServer, count: int = 3, **changes: Any) -> ServerFigures:
    settings = ServerConfig(**{**vars(QUICK), **changes})
    with serve(server) as url:
        return measure(url, conversations(count), settings, lambda _: None)


def test_sglang_counts_passes_by_request() -> None:
    server = FakeServer("sglang")
    found = judge(server)
    tokens = ACCEPTED + PASSES + 1  # the prefill gives one
    assert found.engine == "SGLang 0.5.23"
    assert found.acceptance_length == pytest.approx(tokens / PASSES)
    assert found.by_position == pytest.approx((3 / 4, 2 / 4, 1 / 4))
    assert found.tokens == 3 * tokens
    assert found.tokens_per_s > 0
    assert len(server.sent) == 4, "one that is not counted, then each prompt once"
    assert all(sent["return_meta_info"] and sent["max_tokens"] == 16 for sent in server.sent)


def test_vllm_counts_for_the_whole_server() -> None:
    server = FakeServer("vllm")
    found = judge(server)
    assert found.engine == "vLLM 0.33.0"
    assert found.acceptance_length == pytest.approx(1 + ACCEPTED / PASSES)
    assert found.by_position == pytest.approx((3 / 4, 2 / 4, 1 / 4))
    assert {sent["model"] for sent in server.sent} == {"kimi"}
    assert not found.warnings


def test_other_users_of_a_counting_server_are_noticed() -> None:
    server = FakeServer("vllm")
    reply = REPLIES["vllm"]["chat"]
    short = {**reply, "usage": {**reply["usage"], "completion_tokens": 2}}
    server.fault = lambda _: (200, json.dumps(short).encode())
    assert "others used it" in judge(server).warnings[0]


def test_a_server_without_speculation_has_no_acceptance() -> None:
    server = FakeServer("vllm")
    server.metrics = ["none", "none"]
    found = judge(server)
    assert math.isnan(found.acceptance_length)
    assert found.tokens > 0


FAULTS: dict[str, tuple[int, bytes]] = {
    "an error": (500, b"out of memory"),
    "a reset": (0, b""),
    "half a reply": (200, b'{"choices": [{"index": 0'),
    "not a number": (200, b'{"usage": {"completion_tokens": NaN}}'),
    "a missing field": (200, b'{"choices": []}'),
}


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("name", [name for name in FAULTS if name != "a missing field"])
def test_a_passing_fault_costs_a_second_try(name: str, engine: str) -> None:
    fault: Fault = lambda number: FAULTS[name] if number == 2 else None  # noqa: E731
    found = judge(FakeServer(engine, fault))
    assert len(found.answers) == 3
    assert not found.failed


@pytest.mark.parametrize("name", FAULTS)
def test_a_prompt_that_always_fails_is_listed(name: str) -> None:
    class Broken(FakeServer):
        def post(self, content: dict[str, Any]) -> tuple[int, bytes]:
            if content["messages"][0]["content"] == "Question 1":
                return FAULTS[name]
            return super().post(content)

    found = judge(Broken("sglang"))
    assert len(found.answers) == 2
    assert len(found.failed) == 1
    assert found.failed[0].startswith("line 1: http://")
    assert found.failed[0] in found.warnings[0]


def test_a_request_that_is_refused_is_not_sent_again() -> None:
    server = FakeServer("sglang", lambda _: (400, b"prompt too long"))
    with pytest.raises(ServerError, match=r"status 400 .prompt too long"):
        judge(server)
    assert len(server.sent) == 1


def test_an_address_where_nobody_answers(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="neither SGLang"):
        measure("http://127.0.0.1:9", conversations(1), QUICK, lambda _: None)


def test_an_acceptance_of_one_gets_its_causes_in_order() -> None:
    lines = diagnosis(1.0, None)
    places = ["\n".join(lines).index(cause) for cause, _ in CAUSES]
    assert places == sorted(places)
    assert "export_dir" in lines[-1]
    assert diagnosis(2.4, None) == []
    assert "no drafting" in diagnosis(math.nan, None)[0]
