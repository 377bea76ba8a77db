"""The schedule as a pure function, parameter groups, and float32 norms that do move."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3.config import OptimConfig
from eagle3.names import Schedule
from eagle3.optim import LrSchedule, build_optimizer, update_ratio
from tests.helpers import judge, make_document, pack, tiny_drafter, tiny_head


def test_warmup_of_the_large_run() -> None:
    schedule = LrSchedule.from_config(OptimConfig(warmup_ratio=0.01), 3e-5, 25_450)
    assert schedule.warmup_steps == 255
    assert schedule(0) == pytest.approx(3e-5 / 255)
    assert schedule(254) == pytest.approx(3e-5)
    assert schedule(255) == pytest.approx(3e-5)
    assert schedule(25_450) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("kind", list(Schedule))
def test_shape_halfway_and_at_the_end(kind: Schedule) -> None:
    schedule = LrSchedule(1.0, 110, 10, kind, min_ratio=0.1)
    half = {Schedule.cosine: 0.55, Schedule.linear: 0.55, Schedule.constant: 1.0}[kind]
    end = {Schedule.cosine: 0.1, Schedule.linear: 0.1, Schedule.constant: 1.0}[kind]
    assert schedule(60) == pytest.approx(half)
    assert schedule(110) == schedule(500) == pytest.approx(end)
    assert all(schedule(step) > 0 for step in range(110))


def test_linear_decay_is_the_reference_trainers() -> None:
    """Same decay; the reference wastes its first step at rate 0, ours warms up one step earlier."""
    golden = Path(__file__).parent / "golden" / "s32_adamw_clip_linear.safetensors"
    stored = load_file(golden)["out.lrs"].tolist()
    schedule = LrSchedule(3e-4, 20, 2, Schedule.linear)
    assert stored[0] == 0.0
    assert [schedule(0), schedule(1)] == pytest.approx([stored[1], 3e-4])
    assert [schedule(step) for step in range(2, 20)] == pytest.approx(stored[2:])


def test_no_warmup_and_a_single_step() -> None:
    assert LrSchedule.from_config(OptimConfig(warmup_ratio=0.0), 1.0, 1)(0) == 1.0
    assert LrSchedule.from_config(OptimConfig(warmup_ratio=1.0), 1.0, 4)(1) == 0.5


def test_weight_decay_spares_norms() -> None:
    drafter = tiny_drafter()
    optimizer = build_optimizer(drafter, OptimConfig(weight_decay=0.1), 1e-3)
    decayed = {id(p) for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    for name, parameter in drafter.named_parameters():
        assert (id(parameter) in decayed) == ("norm" not in name), name


def test_every_norm_weight_moves_and_moments_are_float32() -> None:
    """Under bfloat16 autocast, at a rate that pure bfloat16 weights would round away."""
    drafter, head = tiny_drafter(seed=3), tiny_head()
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
    optimizer = build_optimizer(drafter, OptimConfig(), 1e-4)
    batch = pack([make_document(12, 1), make_document(9, 2)])
    for _ in range(30):
        with torch.autocast("cpu", torch.bfloat16):
            loss = judge(drafter, head, batch, ttt_steps=2).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, parameter in drafter.named_parameters():
        assert parameter.dtype == torch.float32
        if "norm" in name:
            assert float((parameter != 1.0).double().mean()) == 1.0, name
    moments = [s[key] for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert moments
    assert all(moment.dtype == torch.float32 for moment in moments)


def test_update_ratio_is_what_the_step_did() -> None:
    weight = torch.nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(1)))
    optimizer = torch.optim.AdamW([weight], lr=1e-2, weight_decay=0.0)
    for seed in range(3):
        weight.grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
        before = weight.detach().clone()
        optimizer.step()
    moved = (weight.detach() - before).norm() / weight.detach().norm()
    assert float(update_ratio(optimizer, [weight])) == pytest.approx(float(moved), rel=1e-4)
    assert math.isnan(float(update_ratio(optimizer, [torch.nn.Parameter(torch.ones(1))])))
