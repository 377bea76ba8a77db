"""Planned rows against the rows that training finds in a pack; counted parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.config import ComputeConfig, ModelConfig
from eagle3.model.drafter import Drafter
from eagle3.model.ttt import read_rows, step_rows
from eagle3.names import Accelerator, Arch, ComputedRows, NormPreset, Precision
from eagle3.planning import PackRows, PlannedDocument, Step
from eagle3.planning.sizes import Parameters
from tests.helpers import TINY, make_document, pack

DOCUMENT = st.integers(1, 12).flatmap(
    lambda rows: st.builds(PlannedDocument, st.just(rows), st.integers(0, rows))
)


@given(st.lists(DOCUMENT, min_size=1, max_size=4), st.integers(1, 9))
@settings(max_examples=100)
def test_planned_rows_are_those_of_training(
    documents: list[PlannedDocument], ttt_steps: int
) -> None:
    step = Step(TINY, ComputeConfig(), PackRows(tuple(documents)), ttt_steps)
    batch = pack(
        [
            make_document(
                d.rows + 1, seed=0, mask=[int(i > d.prompt_rows) for i in range(d.rows + 1)]
            )
            for d in documents
        ]
    )
    found = [step_rows(batch, each).starts.numel() for each in range(ttt_steps)]
    assert list(step.judged) == found
    assert step.computed == len(read_rows(batch, ttt_steps))
    read = read_rows(batch, ttt_steps).tolist()
    reached = {min(row + each, step.rows - 1) for row in read for each in range(ttt_steps)}
    assert step.reached == len(reached)
    assert step.verifier_rows == int(batch.loss_mask.sum())
    everything = replace(step, compute=ComputeConfig(rows=ComputedRows.all))
    assert everything.computed == everything.verifier_rows == step.rows == len(batch)


@given(st.integers(1, 5000), st.integers(1, 3000), st.floats(0, 1))
def test_typical_pack_has_the_rows_and_the_share(rows: int, document: int, share: float) -> None:
    typical = PackRows.typical(rows, document, share)
    assert typical.rows == rows
    assert abs(typical.gated - share * rows) <= len(typical.documents) / 2 + 1e-6
    assert max(d.rows for d in typical.documents) <= document


@pytest.mark.parametrize("share", [-0.1, 1.01, float("nan")])
def test_a_share_is_a_share(share: float) -> None:
    with pytest.raises(ValueError, match="expected a share from 0 to 1"):
        PackRows.typical(10, 5, share)


@pytest.mark.parametrize("preset", NormPreset)
@pytest.mark.parametrize("arch", Arch)
@pytest.mark.parametrize("trainable", [True, False], ids=["trained head", "frozen head"])
def test_parameters_are_those_of_the_drafter(
    preset: NormPreset, arch: Arch, trainable: bool
) -> None:
    model = replace(TINY, norm_layout=preset, arch=arch, lm_head_trainable=trainable)
    with torch.device("meta"):
        drafter = Drafter(model)
    counted = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    assert Parameters(model).trained == counted


def test_precision_follows_the_device() -> None:
    step = Step(ModelConfig(), ComputeConfig(), PackRows.typical(8, 8, 1.0), 3)
    assert step.mixed
    assert not replace(step, accelerator=Accelerator.cpu).mixed
    assert replace(step, accelerator=Accelerator.cpu, precision=Precision.bf16_mixed).mixed
    assert not replace(step, precision=Precision.float32).mixed
