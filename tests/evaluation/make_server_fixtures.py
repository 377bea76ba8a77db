"""Makes ``server_replies.json`` by running the engines' own code on made-up counts.

    python -m tests.evaluation.make_server_fixtures SGLANG_WHEEL VLLM_WHEEL

The wheels come from ``pip download --no-deps sglang==0.5.23 vllm==0.33.0``; ``prometheus_client``
must be installed. Only single functions and classes are taken out of their files, so that nothing
that needs a card is imported.
"""

from __future__ import annotations

import ast
import hashlib
import json
import logging
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

SGLANG_FILE = "sglang/srt/managers/tokenizer_manager.py"
SGLANG_CHAT = "sglang/srt/entrypoints/openai/protocol.py"
VLLM_METRICS = "vllm/v1/spec_decode/metrics.py"
VLLM_CHAT = "vllm/entrypoints/openai/chat_completion/protocol.py"
TARGET = Path(__file__).with_name("server_replies.json")
ROUNDS = ((1, 3), (0, 3), (3, 3), (2, 3))
"""Accepted and proposed drafts of the rounds that both engines report on."""


def read(wheel: Path, name: str) -> tuple[str, dict[str, str]]:
    """A file of a wheel and where it is from."""
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(name)
    version = wheel.name.split("-")[1]
    found = {"version": version, "file": name, "sha256": hashlib.sha256(content).hexdigest()}
    return content.decode(), found


def definition(source: str, name: str) -> ast.FunctionDef | ast.ClassDef:
    """A function or class of a module, wherever it stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
    raise LookupError(name)


def fields(source: str, name: str) -> list[str]:
    """Annotated fields of a class, in their order."""
    body = definition(source, name).body
    return [str(ast.unparse(n.target)) for n in body if isinstance(n, ast.AnnAssign)]


def sglang_meta_info(source: str) -> dict[str, Any]:
    """What the engine adds to the ``meta_info`` of a finished request that drafted."""
    function = definition(source, "_calculate_spec_decoding_metrics")
    assert isinstance(function, ast.FunctionDef)
    for argument in function.args.args:
        argument.annotation = None
    proposed = ROUNDS[0][1]
    spec = types.SimpleNamespace(
        speculative_num_draft_tokens=proposed + 1, speculative_algorithm="EAGLE3"
    )
    scope: dict[str, Any] = {
        "get_spec": lambda: spec,
        "_ragged_verify_cap_accept": lambda: False,  # a mode of its own that is off by default
    }
    module = ast.fix_missing_locations(ast.Module([function], []))
    exec(compile(module, SGLANG_FILE, "exec"), scope)
    accepted = [a for a, _ in ROUNDS]
    reply = types.SimpleNamespace(
        spec_verify_ct=[len(ROUNDS)],
        spec_num_correct_drafts=[sum(accepted)],
        completion_tokens=[1 + sum(accepted) + len(ROUNDS)],
        spec_correct_drafts_histogram=[[accepted.count(n) for n in range(proposed + 1)]],
    )
    meta = {
        "prompt_tokens": 12,
        "completion_tokens": reply.completion_tokens[0],
        "e2e_latency": 0.5,
    }
    scope[function.name](None, meta, reply, 0)
    return meta


def vllm_metrics(source: str) -> tuple[str, str]:
    """``/metrics`` before and after the rounds, as the engine's classes count them."""
    import prometheus_client

    for name in ("vllm", "vllm.config", "vllm.logger", "vllm.v1", "vllm.v1.metrics"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["vllm.config"].SpeculativeConfig = object  # type: ignore[attr-defined]
    sys.modules["vllm.logger"].init_logger = logging.getLogger  # type: ignore[attr-defined]
    utils = types.ModuleType("vllm.v1.metrics.utils")
    utils.create_metric_per_engine = lambda metric, values: {  # type: ignore[attr-defined]
        engine: metric.labels(*labels) for engine, labels in values.items()
    }
    sys.modules["vllm.v1.metrics.utils"] = utils
    module = types.ModuleType("vllm_metrics")
    sys.modules["vllm_metrics"] = module
    exec(compile(source, VLLM_METRICS, "exec"), module.__dict__)
    proposed = ROUNDS[0][1]
    config = types.SimpleNamespace(num_speculative_tokens=proposed)
    counters = module.SpecDecodingProm(config, ["model_name", "engine"], {0: ["kimi", "0"]})
    texts = []
    for rounds in (ROUNDS[:1], ROUNDS):
        stats = module.SpecDecodingStats.new(proposed)
        for accepted, drafted in rounds:
            stats.observe_draft(drafted, accepted)
        counters.observe(stats)
        lines = prometheus_client.generate_latest().decode().splitlines()
        texts.append("\n".join(line for line in lines if "vllm:" in line) + "\n")
    return texts[0], texts[1]


def chat_reply(fields_of: dict[str, list[str]], tokens: int, **choice: Any) -> dict[str, Any]:
    """A reply whose keys are the engine's; those that a client may not rely on are null."""
    known = {
        "id": "1",
        "object": "chat.completion",
        "created": 1,
        "model": "kimi",
        "usage": {"prompt_tokens": 12, "total_tokens": 12 + tokens, "completion_tokens": tokens},
    }
    message = {"role": "assistant", "content": "words"}
    one = {"index": 0, "message": message, "finish_reason": "stop", **choice}
    assert set(one) <= set(fields_of["choice"]), "the engine has other fields now"
    reply = {name: known.get(name) for name in fields_of["reply"]}
    return reply | {"choices": [{name: one.get(name) for name in fields_of["choice"]}]}


def main() -> None:
    sglang, vllm = map(Path, sys.argv[1:3])
    manager, manager_origin = read(sglang, SGLANG_FILE)
    protocol, protocol_origin = read(sglang, SGLANG_CHAT)
    metrics, metrics_origin = read(vllm, VLLM_METRICS)
    chat, chat_origin = read(vllm, VLLM_CHAT)
    names = {"reply": "ChatCompletionResponse", "choice": "ChatCompletionResponseChoice"}
    meta = sglang_meta_info(manager)
    before, after = vllm_metrics(metrics)
    tokens = meta["completion_tokens"]
    content = {
        "origins": [manager_origin, protocol_origin, metrics_origin, chat_origin],
        "rounds": ROUNDS,
        "sglang": {
            "server_info": {"version": sglang.name.split("-")[1], "internal_states": [{}]},
            "chat": chat_reply(
                {key: fields(protocol, name) for key, name in names.items()}, tokens, meta_info=meta
            ),
        },
        "vllm": {
            "version": {"version": vllm.name.split("-")[1]},
            "chat": chat_reply({key: fields(chat, name) for key, name in names.items()}, tokens),
            "metrics_before": before,
            "metrics_after": after,
        },
    }
    TARGET.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"{TARGET}: {TARGET.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
