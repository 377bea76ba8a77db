"""Makes ``fixtures/``: replies of servers that hand out states, shaped by the engines' own code.

    python -m tests.verifier.make_server_fixtures SGLANG_WHEEL VLLM_WHEEL

The wheels come from ``pip download --no-deps sglang==0.5.23 vllm==0.33.0``. Single functions are
taken out of their files and run on made-up states, so nothing that needs a card is imported. Where
the engine has a statement in the middle of a long method, only that statement is run.

SpecForge's capture is a patch of SGLang and in no wheel; its replies follow the patch's text and
are marked so in ``origins``.
"""

from __future__ import annotations

import ast
import fcntl
import json
import os
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.evaluation.make_server_fixtures import definition, fields, read

TARGET = Path(__file__).with_name("fixtures")
PROCESSOR = "sglang/srt/managers/scheduler_components/batch_result_processor.py"
STREAMER = "sglang/srt/managers/scheduler_components/output_streamer.py"
MANAGER = "sglang/srt/managers/tokenizer_manager.py"
LOGITS = "sglang/srt/layers/logits_processor.py"
FIELDS = "sglang/srt/arg_groups/field_order.py"
VLLM_CONNECTOR = "vllm/distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py"
VLLM_COMPLETION = "vllm/entrypoints/openai/completion/protocol.py"
RULES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "GptOssForCausalLM": "gpt_oss",
    "DeepseekV3ForCausalLM": "deepseek_v2",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
}
"""Verifier class and the file with its rule for layer ids."""
READ_OPTIONS = (
    "model_path",
    "dtype",
    "quantization",
    "chunked_prefill_size",
    "enable_return_hidden_states",
    "return_hidden_states_mode",
    "enable_return_aux_hidden_states",
    "aux_hidden_state_capture",
    "return_aux_hidden_state_layer_ids",
)
"""Of ``/server_info``, where the engine lists all its options; kept are those it has."""
ASKED = ([1, 15, 28], [2, 16, 29], [3, 16, 32], None)
NUM_LAYERS = 32
HIDDEN, NUM_AUX, VOCAB = 8, 3, 50
LENGTHS = (1, 2, 3, 5, 7, 11, 4, 6, 9, 8)
BLOCK = 4


def run(node: ast.stmt | list[ast.stmt], name: str, **scope: Any) -> dict[str, Any]:
    """Execute statements of an engine; returns the names they leave."""
    body = node if isinstance(node, list) else [node]
    for part in body:
        if isinstance(part, ast.FunctionDef):
            part.decorator_list, part.returns = [], None
            for argument in (*part.args.args, *part.args.kwonlyargs):
                argument.annotation = None
    exec(compile(ast.fix_missing_locations(ast.Module(body, [])), name, "exec"), scope)
    return scope


def function(source: str, name: str, file: str, **scope: Any) -> Any:
    """One function or method of an engine, unbound."""
    return run(definition(source, name), file, torch=torch, **scope)[name]


def statement(source: str, test: str, holds: str) -> ast.stmt:
    """The shortest ``if`` with this condition whose body mentions ``holds``."""
    found = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If)
        and ast.unparse(node.test) == test
        and holds in ast.unparse(node)
    ]
    return min(found, key=lambda node: len(ast.unparse(node)))


class Mode:
    """``CaptureHiddenMode.FULL``, as far as it is asked."""

    def need_capture(self) -> bool:
        return True

    is_full = need_capture

    def is_last(self) -> bool:
        return False


def sglang_meta(sources: dict[str, str], aux: Tensor | None, last: Tensor) -> dict[str, Any]:
    """``meta_info`` with the states of one request of one token to generate."""
    pack = lambda states: states  # noqa: E731  # made-up states are packed already
    choose = function(
        sources[LOGITS], "_get_hidden_states_to_store", LOGITS, pack_aux_hidden_states=pack
    )
    metadata = types.SimpleNamespace(capture_hidden_mode=Mode())
    stored = choose(None, last, None, aux, last[-1:], None, None, None, metadata)
    append = function(sources[PROCESSOR], "_append_prefill_hidden_states", PROCESSOR)
    request = types.SimpleNamespace(return_hidden_states=True, hidden_states=[], finished_len=1)
    output = types.SimpleNamespace(hidden_states=stored)
    append(
        None,
        req=request,
        logits_output=output,
        hidden_state_offset=0,
        capture_hidden_mode=Mode(),
        extend_input_len=len(last),
    )
    streamer = types.SimpleNamespace(return_hidden_states=True, output_hidden_states=[])
    part = statement(sources[STREAMER], "self.return_hidden_states", "finished_len")
    run(part, STREAMER, self=streamer, req=request)
    meta: dict[str, Any] = {"prompt_tokens": len(last), "cached_tokens": 0, "completion_tokens": 1}
    part = statement(
        sources[MANAGER], "getattr(recv_obj, 'output_hidden_states', None)", "meta_info"
    )
    run(part, MANAGER, recv_obj=streamer, i=0, meta_info=meta)
    return meta


def layers_to_enter(source: str, file: str, asked: list[int] | None) -> list[int]:
    """What a model class makes of layer ids."""
    model = types.SimpleNamespace(layers_to_capture=[])
    config = types.SimpleNamespace(num_hidden_layers=NUM_LAYERS)
    group = types.SimpleNamespace(is_last_rank=True)
    owner = types.SimpleNamespace(model=model, config=config, pp_group=group)
    function(source, "set_eagle3_layers_to_capture", file)(owner, asked)
    return list(model.layers_to_capture)


def vllm_file(source: str, path: Path, ids: Tensor, states: Tensor) -> dict[str, Any]:
    """Write one request's file the way the connector does; returns the reply's transfer fields."""
    blocks = -(-len(ids) // BLOCK)
    cache = torch.zeros(blocks + 1, states.shape[1], BLOCK, HIDDEN, dtype=states.dtype)
    slots = torch.arange(len(ids)) + BLOCK  # block 0 is the null block
    cache[slots // BLOCK, :, slots % BLOCK] = states
    extract = function(source, "extract_from_kv_cache", VLLM_CONNECTOR)
    taken = extract(cache, torch.arange(BLOCK, (blocks + 1) * BLOCK), len(ids))
    lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    write = function(source, "_write_tensors", VLLM_CONNECTOR, os=os, save_file=save_file)
    event = types.SimpleNamespace(synchronize=lambda: None)
    write({"hidden_states": taken.contiguous(), "token_ids": ids}, event, str(path), lock)
    Path(f"{path}.lock").unlink()
    finished = function(
        source, "request_finished", VLLM_CONNECTOR, PendingSave=types.SimpleNamespace
    )
    connector = types.SimpleNamespace(
        _request_filenames={"r": f"/shared/{path.name}"}, _pending_saves={}
    )
    request = types.SimpleNamespace(
        request_id="r", kv_transfer_params=None, prompt_token_ids=ids.tolist()
    )
    _, reply = finished(connector, request, [1])
    return dict(reply)


def documents() -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Ids, aux states [n, K * H], states before and after the final norm [n, H], all distinct."""
    made = []
    for place, length in enumerate(LENGTHS):
        draw = torch.Generator().manual_seed(place)
        ids = torch.randint(0, VOCAB, (length,), generator=draw)
        wide = torch.randn(length, (NUM_AUX + 2) * HIDDEN, generator=draw).to(torch.bfloat16)
        aux, pre, post = wide.split((NUM_AUX * HIDDEN, HIDDEN, HIDDEN), dim=1)
        made.append((ids, aux.contiguous(), pre.contiguous(), post.contiguous()))
    return made


def before_norm_classes(wheel: Path) -> list[str]:
    """Classes of models, drafts aside, that hand a state of their own choice to the reply."""
    found: list[str] = []
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.startswith("sglang/srt/models/") or not name.endswith(".py"):
                continue
            text = archive.read(name).decode()
            draft = name.removesuffix(".py").endswith(("mtp", "nextn"))
            if "hidden_states_before_norm=" in text and not draft:
                for node in ast.parse(text).body:
                    if (
                        isinstance(node, ast.Assign)
                        and ast.unparse(node.targets[0]) == "EntryClass"
                    ):
                        names = ast.unparse(node.value).strip("[]").split(", ")
                        found += [each for each in names if not each.endswith("MTP")]
    return sorted(found)


def sglang_fixture(wheel: Path) -> dict[str, Any]:
    """All that is asked of SGLang's wheel."""
    parts = {file: read(wheel, file) for file in (PROCESSOR, STREAMER, MANAGER, LOGITS, FIELDS)}
    sources = {file: text for file, (text, _) in parts.items()}
    origins = [origin for _, origin in parts.values()]
    rules = []
    for verifier, name in RULES.items():
        file = f"sglang/srt/models/{name}.py"
        text, origin = read(wheel, file)
        origins.append(origin)
        for asked in ASKED:
            found = layers_to_enter(text, file, asked)
            rules.append({"verifier": verifier, "asked": asked, "entering": found})
    replies = [
        {
            "aux": sglang_meta(sources, aux, post),
            "last": sglang_meta(sources, None, post),
        }
        for _, aux, _, post in documents()
    ]
    order = definition_value(sources[FIELDS], "POSITIONAL_FIELD_ORDER")
    return {
        "origins": origins,
        "version": wheel.name.split("-")[1],
        "num_layers": NUM_LAYERS,
        "server_fields": [name for name in order if name in READ_OPTIONS],
        "before_norm_classes": before_norm_classes(wheel),
        "rules": rules,
        "replies": replies,
    }


def definition_value(source: str, name: str) -> list[str]:
    """A module's tuple of strings."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return list(ast.literal_eval(node.value))
    raise LookupError(name)


def vllm_fixture(wheel: Path) -> dict[str, Any]:
    """All that is asked of vLLM's wheel; writes the files of states."""
    connector, connector_origin = read(wheel, VLLM_CONNECTOR)
    protocol, protocol_origin = read(wheel, VLLM_COMPLETION)
    replies = []
    for place, (ids, aux, pre, _) in enumerate(documents()):
        states = torch.cat((aux, pre), dim=1).view(len(ids), NUM_AUX + 1, HIDDEN)
        path = TARGET / f"vllm_{place}.safetensors"
        replies.append(vllm_file(connector, path, ids, states))
    return {
        "origins": [connector_origin, protocol_origin],
        "version": wheel.name.split("-")[1],
        "reply_fields": fields(protocol, "CompletionResponse"),
        "choice_fields": fields(protocol, "CompletionResponseChoice"),
        "replies": replies,
    }


def main() -> None:
    sglang, vllm = map(Path, sys.argv[1:3])
    TARGET.mkdir(exist_ok=True)
    content = {
        "specforge_origin": "github.com/sgl-project/SpecForge e7486d08, "
        "patches/sglang/v0.5.20/spec-capture.patch, read as text and not run",
        "sglang": sglang_fixture(sglang),
        "vllm": vllm_fixture(vllm),
    }
    path = TARGET / "server_states.json"
    path.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")
    truth = {}
    for place, (ids, aux, pre, post) in enumerate(documents()):
        truth |= {f"{place}.ids": ids, f"{place}.aux": aux, f"{place}.pre_norm": pre}
        truth[f"{place}.post_norm"] = post
    save_file(truth, TARGET / "truth.safetensors")
    for file in TARGET.iterdir():
        file.chmod(0o644)  # safetensors makes its files private
    print(f"{TARGET}: {sum(file.stat().st_size for file in TARGET.iterdir()):,} bytes")


if __name__ == "__main__":
    main()
