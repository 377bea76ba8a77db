"""Skipped rows and the shared embedding half change nothing: values and every gradient, float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eagle3.config import ComputeConfig, ModelConfig
from eagle3.data.batch import PackedBatch
from eagle3.model.layers import NormLayout
from eagle3.model.ttt import read_rows, step_rows
from eagle3.names import (
    Arch,
    AttentionImpl,
    ComputedRows,
    EmbeddingHalf,
    LossImpl,
    NormPreset,
    Recompute,
)
from tests.helpers import TINY, judge, make_document, pack, tiny_drafter, tiny_head

PLAIN = replace(ComputeConfig.reference(), attention=AttentionImpl.reference)
ONE_BY_ONE = {
    "rows": replace(PLAIN, rows=ComputedRows.read),
    "embedding_half": replace(PLAIN, embedding_half=EmbeddingHalf.once),
    "sdpa": replace(PLAIN, attention=AttentionImpl.sdpa),
    "attention": replace(PLAIN, attention=AttentionImpl.merged),
    "loss": replace(PLAIN, loss=LossImpl.deferred),
    "recompute": replace(PLAIN, recompute=Recompute.mlp),
    "all": ComputeConfig(recompute=Recompute.mlp),
}
NORMS = {preset.value: NormLayout.preset(preset) for preset in NormPreset}


def batch_of(masks: list[list[int]], context: int = 0) -> PackedBatch:
    """Documents with these gates, float64; the first ``context`` rows of the pack start nothing."""
    documents = [make_document(len(m), 5 + i, mask=m) for i, m in enumerate(masks)]
    batch = pack(documents)
    starts = batch.start_mask.clone()
    starts[:context] = False
    wide = {"aux_hidden": batch.aux_hidden.double(), "last_hidden": batch.last_hidden.double()}
    return replace(batch, start_mask=starts, **wide)


def values_and_gradients(
    compute: ComputeConfig, batch: PackedBatch, config: ModelConfig, norms: NormLayout, steps: int
) -> dict[str, Tensor]:
    drafter = tiny_drafter(config, norms=norms, dtype=torch.float64)
    head = tiny_head(dtype=torch.float64)
    aux = batch.aux_hidden.clone().requires_grad_()
    result = judge(
        drafter, head, replace(batch, aux_hidden=aux),
        ttt_steps=steps, compute=compute, step_loss_decay=0.8,
    )  # fmt: skip
    result.loss.backward()
    assert aux.grad is not None
    found = {"loss": result.loss.detach(), "grad of aux_hidden": aux.grad}
    for step, judged in enumerate(result.steps):
        for name in ("losses", "draft_best", "verifier_best", "covered", "overlap"):
            found[f"{name} of step {step}"] = getattr(judged, name)
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        found[f"grad of {name}"] = parameter.grad
    return found


MASKS = [[0, 0, 0, 0, 1, 1, 1, 0, 0, 1, 1], [0] * 7, [0, 1, 0, 0, 0, 0, 1, 1, 1], [0, 1]]


@pytest.mark.parametrize("norms", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("arch", [Arch.llama, Arch.qwen3])
@pytest.mark.parametrize("window", [None, 6], ids=["all_keys", "window"])
@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_each_technique_alone_and_all_together(
    name: str, norms: NormLayout, arch: Arch, window: int | None
) -> None:
    config = replace(TINY, arch=arch, sliding_window=window)
    batch = batch_of(MASKS, context=5)
    expected = values_and_gradients(PLAIN, batch, config, norms, steps=4)
    found = values_and_gradients(ONE_BY_ONE[name], batch, config, norms, steps=4)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@settings(max_examples=25)
@given(
    masks=st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=14), min_size=1, max_size=4),
    context=st.integers(0, 4),
    steps=st.integers(1, 7),
)
def test_any_mask(masks: list[list[int]], context: int, steps: int) -> None:
    batch = batch_of(masks, context)
    expected = values_and_gradients(PLAIN, batch, TINY, NormLayout(), steps)
    found = values_and_gradients(ONE_BY_ONE["all"], batch, TINY, NormLayout(), steps)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_read_rows_by_hand() -> None:
    """Gates 0 0 0 1 1 of rows 0..4 at three steps: rows 1 and 2 are read at later steps only."""
    batch = batch_of([[0, 0, 0, 0, 1, 1]])
    assert [step_rows(batch, step).starts.tolist() for step in range(3)] == [[3, 4], [2, 3], [1, 2]]
    assert read_rows(batch, 3).tolist() == [1, 2, 3, 4]
    assert read_rows(batch, 1).tolist() == [3, 4]


class _ProductRows(TorchDispatchMode):
    """Rows that each product of these widths multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[tuple[int, int], list[int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            left, right = args[-2:]
            self.rows.setdefault(tuple(right.shape), []).append(left.shape[0])
        return func(*args, **(kwargs or {}))


def test_only_read_rows_are_multiplied() -> None:
    """40 rows of which 3 steps read 12: fc and the step-0 keys and values take all, the rest 12."""
    config = replace(TINY, num_key_value_heads=1)
    drafter, head = tiny_drafter(config), tiny_head()
    batch = pack([make_document(41, 1, mask=[0] * 31 + [1] * 10)])
    read = len(read_rows(batch, 3))
    assert read == 12
    with torch.no_grad(), _ProductRows() as counted:
        judge(drafter, head, batch, ttt_steps=3)
    hidden, queries, keys = config.hidden_size, 4 * config.head_dim, config.head_dim
    rows = counted.rows
    assert rows[hidden, queries] == [12, read, read, read, read, read, read], "q half, q, o"
    assert rows[hidden, keys] == [40, 40, 40, 40] + [read] * 4, "halves of k, v; step 0; later"
    assert rows[3 * hidden, hidden] == [40], "fc"
    assert rows[hidden, config.intermediate_size] == [read] * 6, "gate and up"
    assert sum(rows[hidden, config.draft_vocab_size]) == 10 * 3 + 10, "draft rows, verifier rows"


def _kept(compute: ComputeConfig, steps: int) -> list[Tensor]:
    """What autograd keeps for the backward pass of a pack, one tensor a storage."""
    storages: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    documents = [make_document(60, 2, mask=[1] * 60), make_document(30, 3, mask=[1] * 30)]
    drafter, batch = tiny_drafter(), pack(documents)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = judge(drafter, tiny_head(), batch, ttt_steps=steps, compute=compute)
    assert result.loss.requires_grad
    return list(storages.values())


def test_a_further_step_costs_the_same_memory_each_time() -> None:
    """No mask, no keys laid end to end, no logits: what is kept grows by rows x widths a step."""
    sizes = [
        sum(t.untyped_storage().nbytes() for t in _kept(ComputeConfig(), steps))
        for steps in range(1, 8)
    ]
    growth = [after - before for before, after in pairwise(sizes[1:])]
    assert max(growth) < 1.05 * min(growth)
    plain = [
        sum(t.untyped_storage().nbytes() for t in _kept(PLAIN, steps)) for steps in (2, 3, 6, 7)
    ]
    assert plain[3] - plain[2] > max(growth)


def test_recompute_keeps_no_activation_of_the_mlp() -> None:
    def widths(recompute: Recompute) -> int:
        kept = _kept(ComputeConfig(recompute=recompute), 3)
        wide = [t for t in kept if t.ndim == 2 and t.shape[1] == TINY.intermediate_size]
        # the down projection's weight is as wide
        return sum(t.shape[0] != TINY.hidden_size for t in wide)

    assert widths(Recompute.none) >= 3 * 3
    assert widths(Recompute.mlp) == 0
