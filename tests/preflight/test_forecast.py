"""Steps, memory, disk, time and reading, from lengths and sizes alone."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from eagle3.compose import compose_config
from eagle3.config import Config, ModelConfig, OptimConfig
from eagle3.data.masks import Runs
from eagle3.data.packing import PackingRule, segment_documents
from eagle3.data.plan import packing_report, training_plan
from eagle3.inspection.facts import Severity
from eagle3.names import Accelerator, CardName, OptimizerName, Recompute
from eagle3.optim import build_optimizer
from eagle3.planning import plan
from eagle3.preflighting.forecast import (
    MFU,
    Epoch,
    bytes_per_row,
    checkpoint_bytes,
    flops_per_row,
    judge_disk,
    judge_memory,
    judge_reading,
    judge_steps,
    judge_time,
    planned_rate,
)
from eagle3.preflighting.machine import CARDS, GB, Device
from eagle3.preflighting.report import Report
from tests.helpers import tiny_drafter

LENGTHS = Path(__file__).parents[1] / "golden" / "sampler_lengths.npz"
KIMI = compose_config(["experiment=kimi_100k"])


@pytest.fixture(scope="module")
def recorded() -> Epoch:
    """37,312 documents of 87.8 M tokens; every twentieth validates, a tenth is prompt."""
    with np.load(LENGTHS) as file:
        lengths = file["lengths.37312"].astype(np.int64)
    gates = Runs(np.arange(len(lengths) + 1), np.stack([lengths // 10, lengths - 1], axis=1))
    data, world = KIMI.data, len(range(KIMI.trainer.devices))
    rule = PackingRule(
        KIMI.max_seq_len, data.long_documents, data.split_context_tokens, KIMI.ttt_steps
    )
    trained = np.flatnonzero(np.arange(len(lengths)) % 20 != 0)
    cut = segment_documents(trained, lengths, gates, rule)
    planned = training_plan(cut.segments, rule.max_seq_len, 0, 0, world, 1)
    return Epoch(
        packing=packing_report(cut, planned, rule.max_seq_len, 0),
        total_steps=KIMI.epochs * planned.steps,
        worst_share=1.0,
        longest_document=int(lengths.max()),
    )


def the_finding(report: Report) -> tuple[Severity, str, str]:
    (found,) = report.findings
    return found.severity, found.reason, found.action


def test_steps_and_warmup_of_the_large_run(recorded: Epoch) -> None:
    report = Report()
    judge_steps(report, KIMI, recorded)
    per_epoch, total = report.facts["steps_per_epoch"], report.facts["total_steps"]
    warmup, tokens = report.facts["warmup_steps"], report.facts["rows_per_step"]
    assert isinstance(per_epoch, int)
    assert isinstance(total, int)
    assert isinstance(tokens, float)
    assert 5_090 <= per_epoch <= 5_400
    assert total == 5 * per_epoch
    assert warmup == -(-total // 100)
    assert 250 <= warmup <= 270
    assert 0.98 * 4 * 4096 <= tokens <= 4 * 4096
    assert any("are split" in found.reason for found in report.findings)


def test_the_time_is_rows_over_the_stated_pace(recorded: Epoch) -> None:
    card = CARDS[CardName.rtx_pro_6000]
    rate = planned_rate(KIMI, recorded, card)
    assert card.tflops is not None
    assert rate == pytest.approx(4 * card.tflops * 1e12 * MFU / flops_per_row(KIMI, recorded))
    report = Report()
    judge_time(report, KIMI, recorded, rate, "said")
    assert report.facts["hours"] == pytest.approx(5 * recorded.rows / rate / 3600)
    twice = replace(KIMI, trainer=replace(KIMI.trainer, devices=8))
    assert planned_rate(twice, recorded, card) == pytest.approx(2 * rate)


def test_prompts_cost_less(recorded: Epoch) -> None:
    half = replace(recorded, packing=replace(recorded.packing, supervised_fraction=0.5))
    whole = flops_per_row(KIMI, recorded)
    assert flops_per_row(KIMI, half) < 0.7 * whole < 0.7 * flops_per_row(KIMI, None)


@pytest.mark.parametrize(("measured", "severity"), [(1e9, "warning"), (1e11, "ok")])
def test_a_disk_that_is_too_slow_warns(recorded: Epoch, measured: float, severity: str) -> None:
    report = Report()
    judge_reading(report, KIMI, recorded, 40_000.0, measured)
    found, said, _ = the_finding(report)
    assert found == severity
    assert f"{40_000 * bytes_per_row(KIMI, recorded) / 1e9:.3g} GB/s are needed" in said
    assert 3 * 7168 * 2 < bytes_per_row(KIMI, recorded) < bytes_per_row(KIMI, None) == 4 * 7168 * 2


@pytest.mark.parametrize("recompute", [Recompute.none, Recompute.mlp])
def test_too_little_memory_stops_with_a_length_that_fits(recompute: Recompute) -> None:
    long = replace(KIMI, max_seq_len=1 << 18, compute=replace(KIMI.compute, recompute=recompute))
    report, card = Report(), CARDS[CardName.h100]
    judge_memory(report, long, None, card)
    severity, _, action = the_finding(report)
    longest = report.facts["longest_max_seq_len"]
    assert severity is Severity.stop
    assert f"max_seq_len={longest}" in action
    assert isinstance(longest, int)
    assert plan(replace(long, max_seq_len=longest), card.num_bytes).fits
    assert not plan(replace(long, max_seq_len=longest + 128), card.num_bytes).fits


def test_recomputing_is_offered_where_it_is_enough() -> None:
    between = replace(KIMI, max_seq_len=16384)
    again = replace(between, compute=replace(between.compute, recompute=Recompute.mlp))
    size = (plan(between).total_bytes + plan(again).total_bytes) // 2
    report = Report()
    judge_memory(report, between, None, Device("a card", size))
    assert "compute.recompute=mlp" in the_finding(report)[2]


def test_no_length_fits_a_card_that_weights_fill() -> None:
    report = Report()
    judge_memory(report, KIMI, None, Device("a small card", 16 * GB))
    assert "train on a larger card" in the_finding(report)[2]


def test_a_host_that_is_full_now_only_warns() -> None:
    on_cpu = replace(KIMI.trainer, accelerator=Accelerator.cpu)
    config, report = replace(KIMI, trainer=on_cpu), Report()
    judge_memory(report, config, None, Device("CPU", GB // 10))
    assert the_finding(report)[0] is Severity.warning


def test_too_little_disk_stops(tmp_path: Path) -> None:
    report, one = Report(), checkpoint_bytes(KIMI)
    judge_disk(report, KIMI, tmp_path, lambda path: 4 * one - 1)
    severity, said, action = the_finding(report)
    assert severity is Severity.stop
    assert "14.29 GB (13.31 GiB)" in said
    assert "trainer.keep_last=1" in action
    assert report.facts["checkpoint_bytes"] == one


def test_checkpoints_of_a_run_that_goes_on_are_replaced(tmp_path: Path) -> None:
    report, config = Report(), Config()
    one = checkpoint_bytes(config)
    (tmp_path / "checkpoints").mkdir()
    with (tmp_path / "checkpoints" / "best.ckpt").open("wb") as file:
        file.truncate(one)
    judge_disk(report, config, tmp_path, lambda path: 3 * one)
    assert the_finding(report)[0] is Severity.ok


@pytest.mark.parametrize("optimizer", list(OptimizerName))
@pytest.mark.parametrize("trainable", [True, False])
def test_a_checkpoint_has_the_planned_size(optimizer: OptimizerName, trainable: bool) -> None:
    model = ModelConfig(
        hidden_size=192, vocab_size=300, draft_vocab_size=200, intermediate_size=320,
        num_attention_heads=4, num_key_value_heads=2, head_dim=48, lm_head_trainable=trainable,
    )  # fmt: skip
    config = Config(model=model, optim=OptimConfig(optimizer=optimizer))
    drafter = tiny_drafter(model)
    stepper = build_optimizer(drafter, config.optim, 1e-3)
    for parameter in drafter.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    stepper.step()
    file = io.BytesIO()
    torch.save({"weights": drafter.state_dict(), "optimizer": stepper.state_dict()}, file)
    assert len(file.getvalue()) == pytest.approx(checkpoint_bytes(config), rel=0.02)
