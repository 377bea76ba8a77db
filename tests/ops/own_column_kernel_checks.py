"""What ``test_kernels`` runs in a process of its own: kernels of own-column keys."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3.ops.ttt_attention import DocumentLayout, own_column, own_column_triton, ttt_attention
from tests.ops.row_kernel_checks import DEVICE, INTERPRETED, random

HEADS = {"mha": (3, 3), "gqa": (6, 2), "mqa": (5, 1)}


def _attention(
    rows: int, heads: tuple[int, int], head_dim: int, own: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Inputs of merge: heads cut out of wider rows, lse [Hq, rows] transposed, -inf in row 0."""
    query_heads, kv_heads = heads
    wide = random(rows, query_heads + 2 * kv_heads, head_dim + 1, dtype=dtype)[..., :head_dim]
    out = random(rows, query_heads, head_dim, seed=1, dtype=dtype)
    computed = torch.promote_types(dtype, torch.float32)
    lse = random(query_heads, rows, seed=2, dtype=computed).t()
    lse[:1], out[:1] = -math.inf, 0
    keys = [wide[:, query_heads : query_heads + kv_heads]]
    values = [wide[:, query_heads + kv_heads :]]
    for step in range(1, own):
        keys.append(random(rows, kv_heads, head_dim, seed=2 + step, dtype=dtype))
        values.append(random(kv_heads, rows, head_dim, seed=9 + step, dtype=dtype).transpose(0, 1))
    named = {"query": wide[:, :query_heads], "out": out, "lse": lse}
    return {**named, "own_keys": keys, "own_values": values}


def _both_ways(module: Any, inputs: dict[str, Any], grad_out: Tensor) -> list[Tensor]:
    """Merged out and lse, then the gradients of query, own keys and own values."""
    out, lse = module.merge(**inputs)
    assert (out.dtype, lse.dtype) == (inputs["query"].dtype, inputs["lse"].dtype)
    # What the step-0 keys gave; the own-column part is added.
    grad_query = torch.ones_like(inputs["query"], dtype=lse.dtype)
    backward = {**inputs, "out": out, "lse": lse, "grad_query": grad_query}
    grads = module.backward(grad_out=grad_out, **backward)
    return [out, lse, grad_query, *(g for pair in grads for g in pair)]


def _by_autograd(inputs: dict[str, Any], grad_out: Tensor) -> list[Tensor]:
    """The same from one dense softmax, in which all step-0 keys are one of value ``out``."""
    query, *own = (
        t.detach().clone().requires_grad_()
        for t in (inputs["query"], *inputs["own_keys"], *inputs["own_values"])
    )
    group = query.shape[1] // own[0].shape[1]
    wide = [t.repeat_interleave(group, dim=1) for t in own]
    keys, values = wide[: len(wide) // 2], wide[len(wide) // 2 :]
    scale = query.shape[-1] ** -0.5
    scores = torch.stack([inputs["lse"], *((query * key).sum(-1) * scale for key in keys)], -1)
    weights = torch.softmax(scores, -1)
    out = (weights[..., None] * torch.stack([inputs["out"], *values], 2)).sum(2)
    grad_query, *grads = torch.autograd.grad(out, [query, *own], grad_out)
    pairs = zip(grads[: len(keys)], grads[len(keys) :], strict=True)
    lse = torch.logsumexp(scores, -1).detach()
    return [out.detach(), lse, grad_query + 1, *(g for pair in pairs for g in pair)]


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(
    ("rows", "head_dim", "own"), [(37, 8, 1), (5, 20, 7), (37, 64, 2), (9, 128, 6), (3, 256, 3)]
)
def test_merge_equals_a_dense_softmax(
    heads: tuple[int, int], rows: int, head_dim: int, own: int
) -> None:
    inputs = _attention(rows, heads, head_dim, own, torch.float64)
    grad_out = random(rows, heads[0], head_dim, seed=20)
    found = _both_ways(own_column_triton, inputs, grad_out)
    torch.testing.assert_close(found, _by_autograd(inputs, grad_out), rtol=1e-10, atol=1e-12)
    plain = _both_ways(own_column, inputs, grad_out)
    torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)],
    ids=["float32", "float16", "bfloat16"],
)
def test_merge_computes_in_float32(dtype: torch.dtype, rtol: float) -> None:
    inputs = _attention(21, (6, 2), 24, 3, dtype)
    grad_out = random(21, 6, 24, seed=20, dtype=dtype)
    out, lse = own_column_triton.merge(**inputs)
    expected = own_column.merge(**inputs)
    torch.testing.assert_close(out, expected[0], rtol=rtol, atol=1e-5)
    torch.testing.assert_close(lse, expected[1], rtol=1e-5, atol=1e-6)
    # Of the same merged out: its rounding is the caller's.
    backward = {**inputs, "out": out, "lse": lse, "grad_out": grad_out}
    found = [torch.ones(21, 6, 24, device=DEVICE) for _ in range(2)]
    grads = own_column_triton.backward(**backward, grad_query=found[0])
    plain = own_column.backward(**backward, grad_query=found[1])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grads, plain, rtol=1e-4, atol=1e-5)


def test_merge_takes_any_strides_of_the_gradient() -> None:
    inputs = _attention(6, (4, 2), 12, 2, torch.float64)
    grad_out = torch.ones((), device=DEVICE, dtype=torch.float64).expand(6, 4, 12)
    found = _both_ways(own_column_triton, inputs, grad_out)
    expected = _both_ways(own_column_triton, inputs, grad_out.contiguous())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_merge_of_no_rows_and_of_no_keys() -> None:
    inputs = _attention(0, (4, 2), 8, 2, torch.float64)
    found = _both_ways(own_column_triton, inputs, random(0, 4, 8))
    assert [t.shape[0] for t in found] == [0] * 7
    inputs = {**_attention(3, (4, 2), 8, 1, torch.float64), "own_keys": [], "own_values": []}
    grad_query = torch.ones(3, 4, 8, device=DEVICE, dtype=torch.float64)
    backward = own_column_triton.backward
    assert backward(grad_out=random(3, 4, 8), **inputs, grad_query=grad_query) == []
    assert bool((grad_query == 1).all())


@pytest.mark.skipif(not INTERPRETED, reason="flash attention takes no float64 on CUDA")
@pytest.mark.parametrize("window", [None, 5, 2], ids=lambda window: f"window_{window}")
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_attention_with_kernels_equals_the_reference(
    heads: tuple[int, int], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At step 3 the window of 2 hides all step-0 keys and the first own-column key."""

    def refuse(*_: Any) -> None:
        raise AssertionError("plain PyTorch ran instead of a kernel")

    monkeypatch.setattr(own_column, "merge", refuse)
    monkeypatch.setattr(own_column, "backward", refuse)
    layout, steps = DocumentLayout((0, 5, 6, 13)), 4
    counts = [heads[0]] + [heads[1]] * (2 * steps)
    leaves = [random(13, n, 8, seed=i).requires_grad_() for i, n in enumerate(counts)]
    found, expected = [], []
    for results, implementation in ((found, "merged"), (expected, "reference")):
        out = ttt_attention(
            leaves[0], leaves[1 : 1 + steps], leaves[1 + steps :], layout,
            implementation=implementation, window=window,
        )  # fmt: skip
        results += [out.detach(), *torch.autograd.grad(out, leaves, random(*out.shape, seed=30))]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
