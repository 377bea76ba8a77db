"""What is written computes what was trained, or does not stay."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3.data.vocab import VocabMap
from eagle3.errors import ConfigError, DataError, VerifierError
from eagle3.model.layers import NormLayout
from eagle3.model.trained_head import read_trained_head
from eagle3.model.warm_start import warm_start
from eagle3.names import Arch, ExportDtype, ExportEmbeddings, ExportTarget
from eagle3.serving.card import scripts
from eagle3.serving.config import ExportConfig
from eagle3.serving.plan import ExportPlan, plan_export
from eagle3.serving.source import ExportSource
from eagle3.serving.writing import write_proven
from tests.helpers import TINY, tiny_drafter
from tests.model.trained_heads import verifier_of
from tests.serving.exports import KIMI, tiny_source, write_export
from tests.tiny_run import write_verifier

FLOAT32 = ExportDtype.float32


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("flags", "target"),
    [
        pytest.param({}, ExportTarget.both, id="portable"),
        pytest.param({"fc_norm": True, "norm_output": True}, ExportTarget.both, id="eagle3.1"),
        pytest.param(
            {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
            ExportTarget.speculators,
            id="speculators",
        ),
        pytest.param({"norm_before_residual": True}, ExportTarget.vllm, id="residual"),
    ],
)
@pytest.mark.parametrize("arch", list(Arch), ids=str)
def test_logits_are_those_of_the_drafter(
    tmp_path: Path, flags: dict[str, bool], target: ExportTarget, arch: Arch
) -> None:
    if arch is Arch.qwen3 and target is ExportTarget.both:
        target = ExportTarget.vllm
    source = tiny_source(replace(TINY, arch=arch), NormLayout(**flags))
    _, checks = write_export(tmp_path / "out", source, target=target)
    assert all(check.holds for check in checks)
    assert sum("logits" in check.name for check in checks) == 1 + (target is ExportTarget.both)
    assert "export.json" in files(tmp_path / "out")


@pytest.mark.parametrize("target", [ExportTarget.both, ExportTarget.speculators], ids=str)
def test_export_then_import_is_the_identity(tmp_path: Path, target: ExportTarget) -> None:
    source = tiny_source()
    write_export(tmp_path / "out", source, target=target, dtype=FLOAT32)
    drafter = tiny_drafter(seed=9)
    drafter.d2t, drafter.t2d = source.vocab.d2t, source.vocab.t2d
    head = read_trained_head(tmp_path / "out")
    warm_start(drafter, head, verifier_of(drafter))
    for name, parameter in drafter.named_parameters():
        assert torch.equal(parameter, source.tensors[name]), name
    assert head.aux_layer_ids == source.aux_layer_ids
    assert head.stated["model.rope.theta"] == TINY.rope.theta


def swapped(plan: ExportPlan) -> ExportPlan:
    """Two tensors of one shape under each other's name: no reader of names can tell."""
    tensors = dict(plan.tensors)
    gate, up = (f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up"))
    tensors[gate], tensors[up] = tensors[up], tensors[gate]
    return replace(plan, tensors=tensors)


def with_setting(plan: ExportPlan, **values: Any) -> ExportPlan:
    return replace(plan, config={**plan.config, **values})


IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(swapped, "sglang: logits: differ by", id="swapped"),
        pytest.param(lambda p: with_setting(p, rms_norm_eps=0.5), "vllm: logits", id="eps"),
        pytest.param(lambda p: with_setting(p, norm_output=True), "vllm: logits", id="feedback"),
        pytest.param(
            lambda p: with_setting(p, eagle_config={IDS: [1, 2, 3]}),
            "layers captured: entering [2, 3, 4], trained on [1, 2, 3]",
            id="off by one",
        ),
        pytest.param(
            lambda p: replace(p, tensors={**p.tensors, "extra.weight": torch.ones(2)}),
            "extra.weight: no parameter",
            id="unknown",
        ),
    ],
)
def test_a_wrong_file_does_not_stay(tmp_path: Path, damage: Any, said: str) -> None:
    source, settings = tiny_source(), ExportConfig()
    plan = damage(plan_export(source, settings))
    with pytest.raises(DataError) as raised:
        write_proven(tmp_path / "out", source, plan, settings)
    assert said in str(raised.value)
    assert files(tmp_path) == []


def test_a_map_of_other_tokens_does_not_stay(tmp_path: Path) -> None:
    source, settings = tiny_source(), ExportConfig()
    plan = plan_export(source, settings)
    other = replace(source, vocab=VocabMap.from_selected(range(20), TINY.vocab_size))
    with pytest.raises(DataError, match="draft vocabulary: another map"):
        write_proven(tmp_path / "out", other, plan, settings)


def test_files_that_are_there_stay(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("mine")
    with pytest.raises(ConfigError, match="give another out"):
        write_export(tmp_path / "out", tiny_source())
    assert files(tmp_path / "out") == ["old"]


def test_leftovers_of_a_killed_export_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "other.safetensors").write_text("half")
    write_export(tmp_path / "out", tiny_source())
    assert files(tmp_path) == ["out"]


def with_verifier(source: ExportSource, folder: Path) -> ExportSource:
    write_verifier(folder)
    return replace(source, verifier_directory=folder)


def test_the_embedding_is_the_verifiers_or_absent(tmp_path: Path) -> None:
    source = with_verifier(tiny_source(), tmp_path / "verifier")
    write_export(tmp_path / "with", source, embeddings=ExportEmbeddings.verifier)
    write_export(tmp_path / "without", source)
    copied = load_file(tmp_path / "with" / "model.safetensors")["embed_tokens.weight"]
    stored = load_file(tmp_path / "verifier" / "model.safetensors")["model.embed_tokens.weight"]
    assert copied.dtype == stored.dtype
    assert torch.equal(copied, stored)
    assert "embed_tokens.weight" not in load_file(tmp_path / "without" / "model.safetensors")
    with pytest.raises(ConfigError, match="embeddings=omit"):
        write_export(tmp_path / "no", tiny_source(), embeddings=ExportEmbeddings.verifier)


def test_an_embedding_of_another_width_is_refused(tmp_path: Path) -> None:
    source = with_verifier(tiny_source(replace(TINY, hidden_size=16)), tmp_path / "verifier")
    with pytest.raises(VerifierError, match=r"\[50, 32\], expected \[50, 16\]"):
        write_export(tmp_path / "out", source)
    assert files(tmp_path) == ["verifier"]


def test_serve_scripts(tmp_path: Path) -> None:
    source = tiny_source(verifier=KIMI, aux_layer_ids=(2, 30, 58))
    settings = ExportConfig(num_speculative_tokens=5)
    found = scripts(source, plan_export(source, settings), settings)
    assert set(found) == {"serve_sglang.sh", "serve_vllm.sh"}
    assert [line.strip(" \\") for line in found["serve_sglang.sh"].splitlines()[6:]] == [
        "set -euo pipefail",
        "verifier=${VERIFIER:-moonshotai/Kimi-K2.5}",
        "exec python -m sglang.launch_server",
        '--model-path "$verifier"',
        "--speculative-algorithm EAGLE3",
        '--speculative-draft-model-path "$(cd "$(dirname "$0")" && pwd)"',
        "--speculative-num-steps 5",
        "--speculative-eagle-topk 1",
        "--speculative-num-draft-tokens 6",
        '"$@"',
    ]
    assert "--speculative-draft-attention-backend" in found["serve_sglang.sh"]


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        pytest.param("org/it's $HOME", None, "org/it's $HOME", id="recorded"),
        pytest.param("org/model", "/local/model", "/local/model", id="given"),
        pytest.param("just-a-name", None, None, id="name that cannot be loaded"),
    ],
)
@pytest.mark.parametrize("program", ["python", "vllm"], ids=str)
def test_serve_scripts_run(
    tmp_path: Path, program: str, name: str, given: str | None, wanted: str | None
) -> None:
    """A stand-in for the engine prints the arguments that reach it."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / program).write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tools / program).chmod(0o755)
    out = tmp_path / "a drafter"
    write_export(out, tiny_source(), served_verifier=name)
    environment = {"PATH": f"{tools}:{os.environ['PATH']}"}
    environment |= {} if given is None else {"VERIFIER": given}
    script = out / {"python": "serve_sglang.sh", "vllm": "serve_vllm.sh"}[program]
    done = subprocess.run(
        [script, "--tp", "8"], env=environment, capture_output=True, text=True, check=False
    )
    if wanted is None:
        assert done.returncode != 0
        assert "set VERIFIER to the directory or hub name of just-a-name" in done.stderr
        return
    arguments = done.stdout.splitlines()
    assert arguments[-2:] == ["--tp", "8"]
    assert wanted in arguments
    if program == "vllm":
        setting = json.loads(arguments[arguments.index("--speculative-config") + 1])
        assert setting == {"method": "eagle3", "model": str(out), "num_speculative_tokens": 3}
    else:
        assert arguments[arguments.index("--speculative-draft-model-path") + 1] == str(out)


def test_the_card_says_what_it_is_and_whom_it_serves(tmp_path: Path) -> None:
    source = tiny_source(verifier=KIMI, aux_layer_ids=(3, 31, 59))
    write_export(tmp_path / "out", source)
    card = (tmp_path / "out" / "README.md").read_text()
    for said in (
        "EAGLE-3 drafter for moonshotai/Kimi-K2.5",
        "KimiK25ForConditionalGeneration, 61 layers",
        "SGLang 0.5.14 and later",
        "states entering layers [3, 31, 59]",
        "no single file serves all releases",
        "longest trained context: 512 tokens",
        "compressed-tensors",
        "val/accuracy | 0.5000",
        "| sglang: logits |",
        '"max_seq_len": 4096',
    ):
        assert said in card
