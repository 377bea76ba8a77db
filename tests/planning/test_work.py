"""Counted work against PyTorch's own counter, over a real forward and backward."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from eagle3.config import ComputeConfig, ModelConfig
from eagle3.model.layers import NormLayout
from eagle3.model.verifier_head import VerifierHead
from eagle3.names import (
    Accelerator,
    AttentionImpl,
    ComputedRows,
    EmbeddingHalf,
    LossImpl,
    NormPreset,
    Recompute,
)
from eagle3.planning import PackRows, PlannedDocument, Step, Work, peer_work, work
from eagle3.planning.sizes import Parameters
from tests.helpers import TINY, judge, make_document, pack, tiny_drafter, tiny_head

DOCUMENTS = (PlannedDocument(40, 15), PlannedDocument(23, 0), PlannedDocument(9, 9))
TTT_STEPS = 3
SCORES, WITH_SCORES_AGAIN = 4, 10
"""FLOPs a head dimension and pair, forward and backward."""


def a_step(compute: ComputeConfig, model: ModelConfig = TINY, **options: Any) -> Step:
    return Step(model, compute, PackRows(DOCUMENTS), TTT_STEPS, Accelerator.cpu, **options)


def counted(step: Step, *, full_head: bool = False) -> int:
    """What the counter sees in one forward and backward."""
    model = step.model
    drafter = tiny_drafter(model, norms=NormLayout.preset(model.norm_layout))
    drafter.lm_head.weight.requires_grad_(model.lm_head_trainable)
    head = tiny_head(model)
    if full_head:
        full = torch.randn(model.vocab_size, model.hidden_size)
        head = VerifierHead(
            head.norm_weight, head.weight, eps=1e-5, last_hidden=head.last_hidden, full_weight=full
        )
    documents = [
        make_document(
            d.rows + 1, n, model, mask=[int(i > d.prompt_rows) for i in range(d.rows + 1)]
        )
        for n, d in enumerate(step.pack.documents)
    ]
    batch = pack(documents)
    counter = FlopCounterMode(display=False, custom_mapping=UNKNOWN)
    counter.mod_tracker = _NoModules()
    with counter:
        result = judge(drafter, head, batch, ttt_steps=step.ttt_steps, compute=step.compute)
        result.loss.backward()
    return counter.get_total_flops()


class _NoModules:
    """Its own tracker of modules hangs hooks on them that ``torch.autograd.grad`` refuses."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _pairs(queries: torch.Size, keys: torch.Size, causal: bool) -> int:
    """Visible pairs of query and key, times query heads and their size."""
    _, heads, rows, dim = queries
    return heads * dim * (rows * (rows + 1) // 2 if causal else rows * keys[2])


def _flash(
    query: Any, key: Any, value: Any, dropout: float = 0.0, causal: bool = False, **_: Any
) -> int:
    return SCORES * _pairs(query, key, causal)


def _flash_backward(
    grad: Any, query: Any, key: Any, value: Any, out: Any, lse: Any,
    dropout: float = 0.0, causal: bool = False, **_: Any,
) -> int:  # fmt: skip
    return WITH_SCORES_AGAIN * _pairs(query, key, causal)


def _summed(total: Any, left: torch.Size, right: torch.Size, **_: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


UNKNOWN: dict[Any, Any] = {
    torch.ops.aten.addmm_: _summed,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _flash,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward,
}
"""The counter has no formula for these; the causal form counts what it really multiplies."""


def products(step: Step) -> int:
    """Own-column pairs are sums of elementwise products, which the counter does not see."""
    backward = {AttentionImpl.merged: 10, AttentionImpl.reference: 8, AttentionImpl.sdpa: 0}
    own = step.computed * sum(range(step.ttt_steps)) * Parameters(step.model).query_width
    implementation = step.compute.attention
    unseen = 0 if implementation is AttentionImpl.sdpa else own * (4 + backward[implementation])
    return work(step).total - unseen


COMPUTES = [
    ComputeConfig(*choice)
    for choice in product(ComputedRows, EmbeddingHalf, AttentionImpl, LossImpl, Recompute)
]


@pytest.mark.parametrize("compute", COMPUTES, ids=lambda c: "-".join(map(str, vars(c).values())))
def test_every_technique_costs_what_the_counter_sees(compute: ComputeConfig) -> None:
    step = a_step(compute)
    assert counted(step) == products(step)


@pytest.mark.parametrize(
    "model",
    [
        replace(TINY, lm_head_trainable=False),
        replace(TINY, norm_layout=NormPreset.eagle3_1),
        replace(TINY, norm_layout=NormPreset.speculators),
        replace(TINY, num_attention_heads=4, num_key_value_heads=4, num_aux_layers=2),
    ],
    ids=["frozen head", "eagle3_1", "speculators", "no groups"],
)
def test_every_model_costs_what_the_counter_sees(model: ModelConfig) -> None:
    step = a_step(ComputeConfig(), model)
    assert counted(step) == products(step)


def test_full_head_costs_what_the_counter_sees() -> None:
    step = a_step(ComputeConfig(), full_verifier_head=True)
    assert counted(step, full_head=True) == products(step)
    assert work(step).total > work(replace(step, full_verifier_head=False)).total


def test_a_card_attends_over_all_rows() -> None:
    step = a_step(ComputeConfig())
    on_card = work(replace(step, accelerator=Accelerator.gpu))
    everywhere = work(replace(step, compute=replace(step.compute, rows=ComputedRows.all)))
    assert work(step)["attention"].total < on_card["attention"].total
    assert on_card["attention"].total < everywhere["attention"].total, "fewer own-column pairs"
    assert on_card.total - on_card["attention"].total == work(step).total - (
        work(step)["attention"].total
    )


KIMI = ModelConfig(
    hidden_size=7168,
    vocab_size=163840,
    draft_vocab_size=32000,
    intermediate_size=18432,
    num_attention_heads=64,
    num_key_value_heads=64,
    head_dim=128,
)


def kimi(ttt_steps: int, share: float) -> Work:
    pack = PackRows.typical(2353, 2353, share)
    return work(Step(KIMI, ComputeConfig(), pack, ttt_steps))


def test_work_of_a_large_drafter() -> None:
    """Independent arithmetic: MFLOP of one row's forward, by part."""
    step = Step(KIMI, ComputeConfig(), PackRows.typical(2353, 2353, 1.0), ttt_steps=3)
    forward = {part.name: part.forward / step.rows / 1e6 for part in peer_work(step).parts}
    expected = {
        "fc": 308.3,
        "embedding half": 3 * 352.3,
        "hidden half": 3 * 352.3,
        "o_proj": 3 * 117.4,
        "mlp": 3 * 792.7,
        "lm_head": 3 * 458.8,
        "verifier head": 458.8,
    }
    for name, value in expected.items():
        assert forward[name] == pytest.approx(value, rel=1e-3)
    assert peer_work(step).per_row / 1e9 == pytest.approx(20.1, abs=0.1)


def test_fewer_supervised_rows_are_less_work() -> None:
    """Linear in the computed rows, up to those before an answer and at a document's end."""
    half, whole = kimi(3, 0.5).per_row, kimi(3, 1.0).per_row
    none = kimi(3, 0.0)
    assert half == pytest.approx((whole + none.per_row) / 2, rel=5e-3)
    assert {part.name for part in none.parts if part.total} == {
        "fc", "embedding half", "hidden half", "attention"
    }  # fmt: skip
