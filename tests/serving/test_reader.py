"""Faults planted into an export: each is caught, for each engine that would serve it wrongly."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from eagle3.model.layers import NormLayout
from eagle3.names import ExportTarget
from eagle3.serving import independent_forward, independent_reader
from eagle3.serving.independent_reader import (
    NEWEST,
    SGLANG,
    VLLM,
    WrongExportError,
    main,
    problems,
    read,
)
from tests.helpers import TINY
from tests.serving.exports import tiny_source, write_export

Tensors = dict[str, Tensor]
Content = dict[str, Any]
BOTH = (SGLANG, VLLM)


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    write_export(tmp_path / "export", tiny_source())
    return tmp_path / "export"


@pytest.mark.parametrize(
    "module", [independent_reader, independent_forward], ids=["reader", "forward"]
)
def test_it_stands_alone(module: Any) -> None:
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
        )
    }
    own = {"torch", "safetensors"}
    assert "eagle3" not in imported
    assert imported - own <= {"__future__", "collections", "dataclasses", "json", "math",
                              "pathlib", "sys", "typing"}  # fmt: skip


def edit_tensors(directory: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, directory / "model.safetensors")


def edit_config(directory: Path, change: Callable[[Content], object]) -> None:
    path = directory / "config.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def rename(before: str, after: str) -> Callable[[Tensors], object]:
    def change(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith(before)]:
            tensors[name.replace(before, after, 1)] = tensors.pop(name)

    return change


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensor})


def absolute(tensors: Tensors) -> None:
    tensors["d2t"] += torch.arange(TINY.draft_vocab_size) * 3


@pytest.mark.parametrize(
    ("change", "engines", "said"),
    [
        pytest.param(rename("midlayer.", "draft_model.midlayer."), BOTH, "called so", id="prefix"),
        pytest.param(rename("fc.", "_orig_mod.fc."), BOTH, "fc.weight is missing", id="compiled"),
        pytest.param(rename("midlayer.", "model.midlayer."), (VLLM,), "stops at it", id="model."),
        pytest.param(drop("lm_head.weight"), BOTH, "lm_head.weight is missing", id="no lm_head"),
        pytest.param(drop("norm.weight"), BOTH, "norm.weight is missing", id="no norm"),
        pytest.param(drop("d2t"), BOTH, "d2t is missing", id="no d2t"),
        pytest.param(absolute, BOTH, "expected offsets", id="absolute ids"),
        pytest.param(put("d2t", torch.zeros(20).int()), BOTH, "expected int64", id="int32 d2t"),
        pytest.param(put("t2d", torch.ones(50).bool()), BOTH, "does not select", id="other t2d"),
        pytest.param(
            put("layers.0.hidden_norm.weight", torch.ones(32)), BOTH, "same parameter", id="twice"
        ),
        pytest.param(put("verifier_norm.weight", torch.ones(32)), BOTH, "called so", id="leftover"),
        pytest.param(
            put("midlayer.self_attn.q_proj.bias", torch.ones(32)), BOTH, "called so", id="bias"
        ),
        pytest.param(put("input_norm.weight", torch.ones(96)), BOTH, "called so", id="no flag"),
        pytest.param(put("fc.weight", torch.ones(32, 64)), BOTH, "expected [32, 96]", id="shape"),
        pytest.param(
            put("embed_tokens.weight", torch.ones(49, 32)), BOTH, "expected [50, 32]", id="embed"
        ),
        pytest.param(put("norm.weight", torch.full((32,), torch.inf)), BOTH, "inf", id="inf"),
        pytest.param(put("norm.weight", torch.ones(32).int()), BOTH, "int32", id="integers"),
    ],
)
def test_planted_tensors_are_caught(
    exported: Path, change: Callable[[Tensors], object], engines: tuple[str, ...], said: str
) -> None:
    edit_tensors(exported, change)
    for engine in BOTH:
        found = "\n".join(problems(exported, engine))
        assert (said in found) == (engine in engines), found
        if engine in engines:
            with pytest.raises(WrongExportError):
                read(exported, engine, NEWEST[engine])


def setting(key: str, value: Any) -> Callable[[Content], object]:
    return lambda content: content.update({key: value})


def nested(key: str, value: Any) -> Callable[[Content], object]:
    return lambda content: content["eagle_config"].update({key: value})


IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("change", "engines", "said"),
    [
        pytest.param(setting("architectures", ["LlamaModel"]), BOTH, "architectures", id="class"),
        pytest.param(setting(IDS, None), (VLLM,), "engine guesses", id="no ids on top"),
        pytest.param(nested(IDS, []), (SGLANG,), "engine guesses", id="no nested ids"),
        pytest.param(setting(IDS, [1, 2, 3, 4]), (VLLM,), "with 4 ids", id="four ids"),
        pytest.param(setting(IDS, [3, 2, 1]), (VLLM,), "ascending", id="order"),
        pytest.param(nested("use_aux_hidden_state", False), BOTH, "no layer is read", id="off"),
        pytest.param(setting("target_hidden_size", None), BOTH, "null breaks", id="null width"),
        pytest.param(setting("draft_vocab_size", None), BOTH, "draft_vocab_size", id="no D"),
        pytest.param(setting("head_dim", None), BOTH, "head_dim", id="no head_dim"),
        pytest.param(setting("tie_word_embeddings", True), BOTH, "own head", id="tied"),
        pytest.param(setting("attention_bias", True), BOTH, "no bias", id="bias"),
        pytest.param(setting("rope_theta", 5e5), BOTH, "expected the same", id="two thetas"),
        pytest.param(setting("rope_parameters", None), BOTH, "for older readers", id="old rope"),
        pytest.param(setting("logit_scale", 2.0), BOTH, "leave it out", id="scale"),
        pytest.param(setting("hidden_act", "gelu"), BOTH, "'silu'", id="activation"),
        pytest.param(setting("rms_norm_eps", None), BOTH, "expected a number", id="eps"),
        pytest.param(setting("num_hidden_layers", 2), BOTH, "expected 1", id="layers"),
        pytest.param(
            setting("norm_before_residual", True), (SGLANG,), "no SGLang reads it", id="residual"
        ),
        pytest.param(setting("fc_norm", True), BOTH, "fc_norm.0.weight is missing", id="fc_norm"),
        pytest.param(setting("norm_before_fc", True), BOTH, "input_norm", id="norm_before_fc"),
    ],
)
def test_planted_settings_are_caught(
    exported: Path, change: Callable[[Content], object], engines: tuple[str, ...], said: str
) -> None:
    edit_config(exported, change)
    for engine in BOTH:
        found = "\n".join(problems(exported, engine))
        assert (said in found) == (engine in engines), found


def test_names_of_the_oldest_release(exported: Path) -> None:
    """It knows midlayer only, and drops layers.0 without a word."""
    assert not problems(exported, SGLANG, (0, 5, 9))
    edit_tensors(exported, rename("midlayer.", "layers.0."))
    assert not problems(exported, SGLANG, (0, 5, 12))
    found = problems(exported, SGLANG, (0, 5, 9))
    assert any("drops it without a word" in line for line in found)
    assert any("layers.0.mlp.up_proj.weight is missing" in line for line in found)


def test_flags_of_later_releases(tmp_path: Path) -> None:
    norms = NormLayout(norm_before_fc=True, norm_output=True)
    write_export(tmp_path / "export", tiny_source(norms=norms), min_sglang="0.5.18")
    (line,) = problems(tmp_path / "export", SGLANG, (0, 5, 14))
    assert "norm_before_fc: SGLang reads it from 0.5.18 on" in line


def test_a_map_beside_a_full_vocabulary(tmp_path: Path) -> None:
    model = replace(TINY, draft_vocab_size=TINY.vocab_size)
    write_export(tmp_path / "export", tiny_source(model))
    edit_tensors(tmp_path / "export", put("d2t", torch.zeros(TINY.vocab_size, dtype=torch.int64)))
    assert "expected none" in problems(tmp_path / "export", VLLM)[0]


def test_the_speculators_form_is_for_vllm_alone(tmp_path: Path) -> None:
    out = tmp_path / "export"
    write_export(out, tiny_source(), target=ExportTarget.speculators)
    assert not problems(out)
    assert "does not read" in problems(out, SGLANG)[0]
    edit_config(out, lambda content: content.pop("norm_before_residual"))
    assert read(out, VLLM, NEWEST[VLLM]).config["norm_before_residual"] is True


def test_files_that_are_not_one_head(exported: Path) -> None:
    file = exported / "model.safetensors"
    whole = file.read_bytes()
    (exported / "other.safetensors").write_bytes(whole)
    assert "alone" in problems(exported)[0]
    (exported / "other.safetensors").unlink()
    file.write_bytes(whole[: len(whole) // 2])
    assert "cannot be read" in problems(exported)[0]
    file.write_bytes(named_twice(whole))
    assert "fc.weight twice" in problems(exported)[0]
    file.write_bytes(whole)
    (exported / "config.json").write_text("[]")
    assert "no JSON object" in problems(exported)[0]


def named_twice(whole: bytes) -> bytes:
    """The same file whose header names fc.weight once more."""
    size = int.from_bytes(whole[:8], "little")
    header = whole[8 : 8 + size].rstrip()
    fc = json.dumps(json.loads(header)["fc.weight"]).encode()
    header = header[:-1] + b',"fc.weight":' + fc + b"}"
    return len(header).to_bytes(8, "little") + header + whole[8 + size :]


def test_a_directory_without_ids_is_for_no_engine(exported: Path) -> None:
    edit_config(exported, lambda c: [c.pop(IDS), c.pop("eagle_config")])
    assert problems(exported) == [f"config.json: found no {IDS}, expected them"]


def test_as_a_command(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(exported)]) == 0
    assert "nothing wrong" in capsys.readouterr().out
    (exported / "model.safetensors").write_bytes(save({"fc.weight": torch.ones(2)}))
    assert main([str(exported), "sglang", "0.5.9"]) == 2
    assert "lm_head.weight is missing" in capsys.readouterr().out
