"""Tiny drafters to export, without a training run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle3.config import Config, ModelConfig
from eagle3.data.vocab import VocabMap
from eagle3.model.layers import NormLayout
from eagle3.serving.config import ExportConfig
from eagle3.serving.plan import ExportPlan, plan_export
from eagle3.serving.proof import Check
from eagle3.serving.recorded import VerifierIdentity
from eagle3.serving.source import ExportSource
from eagle3.serving.writing import write_proven
from tests.helpers import TINY, tiny_drafter

LLAMA = VerifierIdentity("org/tiny", "LlamaForCausalLM", 4, None)
KIMI = VerifierIdentity(
    "moonshotai/Kimi-K2.5", "KimiK25ForConditionalGeneration", 61, "compressed-tensors"
)
LENGTHS = {
    "documents": 3,
    "longest_document": 600,
    "longest_trained": 512,
    "histogram": {"up to 512": 2, "up to 1024": 1},
}


def tiny_source(
    model: ModelConfig = TINY, norms: NormLayout | None = None, **changes: Any
) -> ExportSource:
    """A drafter whose weights are random, norms included."""
    drafter = tiny_drafter(model, norms=norms)
    source = ExportSource(
        label="a test",
        config=Config(model=model),
        norms=drafter.norms,
        tensors={name: p.detach() for name, p in drafter.named_parameters()},
        vocab=VocabMap(drafter.d2t, drafter.t2d),
        aux_layer_ids=(1, 2, 3),
        verifier=LLAMA,
        verifier_directory=None,
        step=12,
        recorded={"lengths": LENGTHS, "metrics": {"val/accuracy": 0.5}},
    )
    return replace(source, **changes)


def write_export(
    out: Path, source: ExportSource, **settings: Any
) -> tuple[ExportPlan, list[Check]]:
    """Plan, write and prove."""
    wanted = ExportConfig(**settings)
    plan = plan_export(source, wanted)
    return plan, write_proven(out, source, plan, wanted)
