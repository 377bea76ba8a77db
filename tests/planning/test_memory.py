"""Planned memory against measured peaks, and what the plan says of cards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.config import ComputeConfig, Config, ModelConfig, OptimConfig, TrainerConfig
from eagle3.names import (
    Accelerator,
    LossImpl,
    OptimizerName,
    Recompute,
)
from eagle3.ops.distillation import deferred
from eagle3.planning import (
    PackRows,
    PlannedDocument,
    Step,
    kept_bytes,
    longest_max_seq_len,
    peer_bytes,
    plan,
)
from eagle3.planning.phases import CHUNK_BYTES, later_phases, phases
from eagle3.planning.sizes import Parameters

SCRIPT = Path(__file__).with_name("measured_step.py")
FAST, PLAIN = ComputeConfig(), ComputeConfig.reference()


@dataclass(frozen=True)
class Case:
    """A step to measure; documents of equal size, half of each prompt."""

    model: ModelConfig
    ttt_steps: int
    compute: ComputeConfig = FAST
    rows: int = 720
    documents: int = 1
    worst: str = field(default="loss", kw_only=True)
    """Phase of the peak."""

    @property
    def step(self) -> Step:
        size = self.rows // self.documents
        pack = PackRows((PlannedDocument(size, size // 2),) * self.documents)
        return Step(self.model, self.compute, pack, self.ttt_steps, Accelerator.cpu)


SMALL = ModelConfig(
    hidden_size=320,
    vocab_size=3000,
    draft_vocab_size=1536,
    intermediate_size=896,
    num_attention_heads=5,
    num_key_value_heads=5,
    head_dim=64,
    lm_head_trainable=False,
)
MUCH_LOSS = replace(
    SMALL,
    hidden_size=192,
    vocab_size=30_000,
    draft_vocab_size=24_576,
    intermediate_size=512,
    lm_head_trainable=True,
)
MANY_WEIGHTS = replace(SMALL, hidden_size=1152, intermediate_size=3072)
CASES = {
    "seven steps": Case(SMALL, 7),
    "loss": Case(MUCH_LOSS, 3, rows=480),
    "plain": Case(SMALL, 3, PLAIN, rows=480),
    "weights": Case(MANY_WEIGHTS, 2, rows=160, worst="backward of step 0"),
}


def measured(case: Case, work: Path) -> int:
    """Peak bytes of the step in a process of its own.

    Its allocator gives freed memory back at once: by default glibc keeps it between live tensors
    below 32 MiB, which is not what is planned.
    """
    model = case.model
    sizes = {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "heads": model.num_attention_heads,
        "kv_heads": model.num_key_value_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "draft_vocab_size": model.draft_vocab_size,
        "rows": case.rows,
        "documents": case.documents,
    }
    told = {
        "sizes": sizes,
        "compute": asdict(case.compute),
        "ttt_steps": case.ttt_steps,
        "lm_head_trainable": model.lm_head_trainable,
    }
    path = work / "case.json"
    path.write_text(json.dumps(told))
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(path)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    return json.loads(done.stdout.splitlines()[-1])["peak_bytes"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads peak memory from /proc")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_planned_peak_is_measured(case: Case, tmp_path: Path) -> None:
    """None of these sizes was looked at when the formulas were written."""
    worst = max(phases(case.step), key=lambda phase: phase.total)
    assert worst.name == case.worst
    assert worst.total == pytest.approx(measured(case, tmp_path), rel=0.15)


def test_chunks_are_those_of_the_loss() -> None:
    assert {True: deferred.CHUNK_BYTES["cpu"], False: deferred._DEVICE_CHUNK_BYTES} == CHUNK_BYTES


KIMI = ModelConfig(
    hidden_size=7168,
    vocab_size=163840,
    draft_vocab_size=32000,
    intermediate_size=18432,
    num_attention_heads=64,
    num_key_value_heads=64,
    head_dim=128,
)


def a_config(**changes: Any) -> Config:
    trainer = TrainerConfig(accelerator=Accelerator.gpu, devices=4)
    return replace(Config(model=KIMI, trainer=trainer), **changes)


def a_step(supervised_share: float = 1.0) -> Step:
    return Step.of_config(a_config(), PackRows.typical(4096, 4096, supervised_share))


def test_the_table_adds_up() -> None:
    found = plan(a_config(), 96 * 10**9)
    lines = found.lines()
    values = [float(line.split()[-2]) for line in lines[1:-1]]
    assert sum(values) * 1e9 == pytest.approx(found.total_bytes, abs=len(values) * 5e5)
    assert "96 GB" in lines[-1]
    assert "left" in lines[-1]
    assert "too much" in plan(a_config(), 20 * 10**9).lines()[-1]


def test_resident_parts_of_a_large_drafter() -> None:
    """Independent arithmetic: 1.19 G weights, states of 4 x 7,168 values."""
    parts = {part.name: part.num_bytes / 1e9 for part in plan(a_config()).resident}
    assert parts["weights"] == pytest.approx(4.76, abs=0.02)
    assert parts["optimizer states"] == pytest.approx(2 * parts["weights"])
    assert parts["buckets that ranks exchange"] == parts["weights"]
    one, four = (plan(a_config(), world_size=ranks).peak for ranks in (1, 4))
    assert four.total <= one.total, "gradients are views of the buckets"
    assert parts["packs"] == pytest.approx(4096 * 4 * 7168 * 2 / 1e9, rel=1e-2)
    assert parts["verifier: embeddings and heads"] == pytest.approx(2.81, abs=0.01)


@given(
    st.integers(20, 200),
    st.sampled_from(Recompute),
    st.sampled_from([0.0, 0.4, 1.0]),
    st.sampled_from([None, 16384, 100_000]),
)
@settings(max_examples=25)
def test_the_longest_pack_is_the_last_that_fits(
    card_gb: int, recompute: Recompute, share: float, tokens_per_step: int | None
) -> None:
    config = a_config(compute=ComputeConfig(recompute=recompute), tokens_per_step=tokens_per_step)
    card = card_gb * 10**9
    rows = longest_max_seq_len(config, card, supervised_share=share)
    assert rows % 128 == 0
    longer = plan(replace(config, max_seq_len=rows + 128), card, supervised_share=share)
    assert not longer.fits
    if rows:
        assert plan(replace(config, max_seq_len=rows), card, supervised_share=share).fits


def test_what_makes_packs_longer() -> None:
    card = 96 * 10**9
    now = longest_max_seq_len(a_config(), card)
    recomputed = a_config(compute=ComputeConfig(recompute=Recompute.mlp))
    assert longest_max_seq_len(recomputed, card) > now
    assert longest_max_seq_len(a_config(), card, supervised_share=0.5) > now
    assert longest_max_seq_len(a_config(), 2 * card) > now
    assert longest_max_seq_len(a_config(compute=PLAIN), card) < now
    assert longest_max_seq_len(a_config(), card, world_size=1) > now
    muon = a_config(optim=OptimConfig(optimizer=OptimizerName.muon))
    assert longest_max_seq_len(muon, card) > now
    assert longest_max_seq_len(a_config(), 10**9) == 0


def test_gradients_of_earlier_packs_are_there() -> None:
    step = a_step()
    now = {phase.name: phase for phase in phases(step)}
    later = {phase.name: phase for phase in later_phases(step)}
    weights = 4 * Parameters(KIMI).trained
    assert later["loss"].gradients == now["loss"].gradients + weights
    assert weights < later["end"].gradients < 2 * weights
    one, two = a_config(tokens_per_step=4 * 4096), a_config(tokens_per_step=8 * 4096)
    assert plan(one) == plan(a_config())
    assert plan(two).peak == max(later.values(), key=lambda phase: phase.total)


def test_less_is_kept_than_by_the_peer() -> None:
    step = a_step(supervised_share=0.5)
    assert kept_bytes(step) < 0.6 * peer_bytes(step)
    less = replace(step, compute=replace(step.compute, recompute=Recompute.mlp))
    assert kept_bytes(less) < kept_bytes(step)
    plain = replace(step, compute=replace(step.compute, loss=LossImpl.reference))
    assert kept_bytes(plain) > kept_bytes(step)
