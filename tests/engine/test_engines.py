"""The engines' own draft classes load what is exported, and draft what was trained.

``make engine-check``: needs an environment with the engines' wheels, see requirements.txt. SGLang
0.5.23 and vLLM 0.33.0 run on a CPU here, with stand-ins for attention kernels only.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.data.batch import PackedBatch
from eagle3.model.layers import NormLayout
from eagle3.names import Arch, ExportTarget, NormPreset
from eagle3.serving import independent_reader as reader
from eagle3.serving.proof import STEPS, ProofStates, drafter_logits
from eagle3.serving.source import ExportSource
from tests.helpers import TINY
from tests.serving.exports import tiny_source, write_export

pytestmark = pytest.mark.engine

HERE = Path(__file__).parent
ENGINES = {"sglang": (0, 5, 23), "vllm": (0, 33, 0)}
ROWS = 12
ENGINE = pytest.mark.parametrize("engine", ENGINES)


def run(engine: str, directory: Path, states: ProofStates) -> subprocess.CompletedProcess[str]:
    """Load the export and draft, in the engine's own environment."""
    rows = ROWS - STEPS + 1
    content = {
        "embeds": states.embeds,
        "aux_hidden": states.batch.aux_hidden[:rows],
        "steps": STEPS,
    }
    torch.save(content, directory / "in.pt")
    python = os.environ.get("EAGLE3_ENGINE_PYTHON")
    assert python, "set EAGLE3_ENGINE_PYTHON, or run make engine-check"
    command = [python, f"{engine}_draft.py", directory, directory / "in.pt", directory / "out.pt"]
    return subprocess.run(
        [str(part) for part in command],
        cwd=HERE, capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip


def result(engine: str, directory: Path, states: ProofStates) -> dict[str, Any]:
    done = run(engine, directory, states)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = torch.load(directory / "out.pt", weights_only=True)
    return found


def made_up_states(source: ExportSource) -> ProofStates:
    model = source.config.model
    generator = torch.Generator().manual_seed(5)
    width = model.num_aux_layers * model.hidden_size
    aux = torch.randn(ROWS, width, generator=generator)
    embeds = torch.randn(ROWS, model.hidden_size, generator=generator)
    return ProofStates(PackedBatch.of_rows(torch.arange(ROWS), aux), embeds, "made-up states")


def expected(source: ExportSource, states: ProofStates) -> list[Tensor]:
    """Our logits from the last row whose whole chain has tokens, with weights as exported."""
    return [step[ROWS - STEPS] for step in drafter_logits(source, torch.bfloat16, states)]


def worst(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference over the largest logit."""
    pairs = zip(found, wanted, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


KINDS: dict[str, Callable[[], ExportSource]] = {
    "portable": tiny_source,
    "eagle3_1": lambda: tiny_source(
        replace(TINY, norm_layout=NormPreset.eagle3_1), NormLayout(fc_norm=True, norm_output=True)
    ),
    "whole vocabulary": lambda: tiny_source(replace(TINY, draft_vocab_size=TINY.vocab_size)),
}


@ENGINE
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_drafts_what_was_trained(engine: str, kind: str, tmp_path: Path) -> None:
    source = KINDS[kind]()
    write_export(tmp_path / "export", source, min_sglang="0.5.23")
    states = made_up_states(source)
    found = result(engine, tmp_path / "export", states)
    assert worst(found["logits"], expected(source, states)) < 1e-5
    if source.vocab.draft_size < source.vocab.verifier_size:
        assert torch.equal(found["ids"], source.vocab.selected)
    else:
        assert found["ids"] is None


def prefixed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As a trainer that wraps the drafter would save it."""
    return {f"draft_model.{name}": tensor for name, tensor in tensors.items()}


def headless(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}


@ENGINE
@pytest.mark.parametrize("plant", [prefixed, headless], ids=["prefixed", "headless"])
def test_what_an_engine_would_serve_wrongly_the_reader_refuses(
    engine: str, plant: Callable[[dict[str, Tensor]], dict[str, Tensor]], tmp_path: Path
) -> None:
    """The engine stops, or says nothing and drafts nonsense; the reader stops in both cases."""
    source = tiny_source()
    directory = tmp_path / "export"
    write_export(directory, source)
    file = directory / "model.safetensors"
    save_file(plant(load_file(file)), file)
    with pytest.raises(reader.WrongExportError):
        reader.read(directory, engine, ENGINES[engine])
    states = made_up_states(source)
    done = run(engine, directory, states)
    if done.returncode == 0:
        found = torch.load(directory / "out.pt", weights_only=True)
        assert not worst(found["logits"], expected(source, states)) < 0.1


def test_vllm_has_a_class_for_norms_of_single_heads(tmp_path: Path) -> None:
    """A drafter of Qwen3's form; SGLang has no class for it, and its export is refused."""
    source = tiny_source(replace(TINY, arch=Arch.qwen3))
    write_export(tmp_path / "export", source, target=ExportTarget.vllm)
    states = made_up_states(source)
    found = result("vllm", tmp_path / "export", states)
    assert worst(found["logits"], expected(source, states)) < 1e-5
