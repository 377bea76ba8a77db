"""What should train does, what should not does not, and a step that shows it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eagle3.config import Config, ModelConfig
from eagle3.inspection.facts import Severity
from eagle3.names import Accelerator
from eagle3.preflighting.drafting import (
    Models,
    judge_parts,
    judge_step,
    sizes_only,
    step_place,
)
from eagle3.preflighting.report import Report
from tests.helpers import TINY, make_document, pack, tiny_drafter, tiny_head

CPU = torch.device("cpu")
CONFIG = replace(
    Config(model=TINY, max_seq_len=64),
    trainer=replace(Config().trainer, accelerator=Accelerator.cpu),
)
NAMES = {"head": "head", "norm": "norm", "embed_tokens": "embedding"}


def models() -> Models:
    return Models(tiny_drafter(), tiny_head(), NAMES)


def stops(report: Report) -> list[str]:
    return [found.reason for found in report.findings if found.severity is Severity.stop]


def test_a_frozen_layer_is_named() -> None:
    found, report = models(), Report()
    found.drafter.layer.requires_grad_(False)
    judge_parts(report, CONFIG, found.rows)
    (said,) = stops(report)
    assert said.startswith("found frozen, expected trained: layer.")
    assert "fc.weight" not in said
    assert any(line.split()[:3:2] == ["layer", "frozen"] for line in report.tables[0])


@pytest.mark.parametrize("trainable", [True, False])
def test_the_draft_head_trains_as_the_configuration_says(trainable: bool) -> None:
    model = replace(TINY, lm_head_trainable=trainable)
    for built, expected in ((model, 0), (replace(model, lm_head_trainable=not trainable), 1)):
        report = Report()
        judge_parts(report, replace(CONFIG, model=model), sizes_only(replace(CONFIG, model=built))
                    .rows)  # fmt: skip
        assert len(stops(report)) == expected


def test_sizes_are_those_of_real_models() -> None:
    real, planned = models().rows, sizes_only(CONFIG).rows
    assert [(r.name, r.shape, r.trainable) for r in real] == [
        (r.name, r.shape, r.trainable) for r in planned
    ]


def test_one_step_reaches_everything_that_trains() -> None:
    report = Report()
    rate = judge_step(report, CONFIG, models(), pack([make_document(30, 1)]), CPU)
    assert rate is not None
    assert stops(report) == []
    assert "and no frozen one" in report.findings[0].reason


def test_a_part_that_no_gradient_reaches_is_named() -> None:
    found, report = models(), Report()
    found.drafter.fc.register_forward_hook(lambda module, given, out: out.detach())
    judge_step(report, CONFIG, found, pack([make_document(30, 1)]), CPU)
    assert stops(report) == ["no gradient reaches fc.weight"]


def test_a_frozen_part_that_a_gradient_reaches_is_named() -> None:
    found, report = models(), Report()
    found.drafter.embed_tokens.requires_grad_(True)
    judge_step(report, CONFIG, found, pack([make_document(30, 1)]), CPU)
    assert stops(report) == ["a gradient reaches the frozen embed_tokens"]


def test_an_infinite_loss_stops() -> None:
    found, report = models(), Report()
    with torch.no_grad():
        found.drafter.lm_head.weight[0, 0] = torch.inf
    judge_step(report, CONFIG, found, pack([make_document(30, 1)]), CPU)
    assert any("the loss is nan" in said for said in stops(report))


def test_without_a_supervised_row_nothing_is_concluded() -> None:
    report, masked = Report(), make_document(30, 1, mask=[0] * 30)
    assert judge_step(report, CONFIG, models(), pack([masked]), CPU) is None
    assert [found.severity for found in report.findings] == [Severity.warning]


def test_a_step_that_is_too_large_for_a_cpu_is_not_tried() -> None:
    report, large = Report(), ModelConfig(hidden_size=7168, intermediate_size=18432)
    config = replace(CONFIG, model=large, max_seq_len=4096)
    assert step_place(report, config) is None
    assert "too much for this CPU" in report.unchecked[0].reason
