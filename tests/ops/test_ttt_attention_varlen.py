"""The one-call path of other devices, as far as a machine without one can tell.

Shapes and dtypes run on the meta device, where PyTorch registers the real operator signatures.
Numbers run on CPU, where the operators do not exist: a dense stand-in with their documented
contract (log-sum-exp [Hq, L], cumulative lengths, left window) is registered for the test.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3.ops.ttt_attention import DocumentLayout, flash, ttt_attention


def _dense_scores(query: Tensor, key: Tensor, lengths: Tensor, left: int, scale: float) -> Tensor:
    rows = torch.arange(query.shape[0])
    document = torch.bucketize(rows, lengths[1:], right=True)
    back = rows[:, None] - rows[None, :]
    visible = (document[:, None] == document[None, :]) & (back >= 0)
    if left >= 0:
        visible &= back <= left
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = torch.einsum("ihd,jhd->hij", query.float(), key.float()) * scale
    return scores.masked_fill(~visible, -torch.inf)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, *_: Any, **options: Any
) -> tuple[Tensor, ...]:
    assert options["window_size_right"] == 0
    scores = _dense_scores(query, key, lengths, options["window_size_left"], options["scale"])
    lse = torch.logsumexp(scores, -1)
    value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).float()
    out = torch.einsum("hij,jhd->ihd", torch.exp(scores - lse[..., None]), value)
    state = torch.zeros(2, dtype=torch.uint64)
    return out.to(query.dtype), lse, state, state, query.new_empty(0)


def _backward(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    grad_out, query, key, value, out, lse, lengths = (t for t in tensors[:7])
    assert lse.shape == query.shape[:2][::-1]
    assert lse.is_contiguous()
    scores = _dense_scores(query, key, lengths, options["window_size_left"], options["scale"])
    probability = torch.exp(scores - lse[..., None])
    heads = key.shape[1]
    group = query.shape[1] // heads
    wide = value.repeat_interleave(group, dim=1).float()
    delta = (grad_out.float() * out.float()).sum(-1).t()[..., None]
    grad_probability = torch.einsum("ihd,jhd->hij", grad_out.float(), wide)
    grad_scores = probability * (grad_probability - delta) * options["scale"]
    wide = key.repeat_interleave(group, dim=1).float()
    grad_query = torch.einsum("hij,jhd->ihd", grad_scores, wide)
    grad_key = torch.einsum("hij,ihd->jhd", grad_scores, query.float())
    grad_value = torch.einsum("hij,ihd->jhd", probability, grad_out.float())
    grads = (grad_query, *(g.unflatten(1, (heads, group)).sum(2) for g in (grad_key, grad_value)))
    return tuple(g.to(query.dtype) for g in grads)


@pytest.fixture
def varlen_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Send CPU tensors down the one-call path, to the dense stand-in."""
    monkeypatch.setattr(flash, "forward", flash.varlen_forward)
    monkeypatch.setattr(flash, "backward", flash.varlen_backward)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", _forward, "CPU")
        library.impl("_flash_attention_backward", _backward, "CPU")
        yield


def _inputs(device: str, dtype: torch.dtype, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    shapes = [(13, 4, 8)] + [(13, 2, 8)] * (2 * (step + 1))
    return [
        torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
        for shape in shapes
    ]


def _run(
    tensors: list[Tensor], implementation: str, window: int | None, rows: Tensor | None = None
) -> list[Tensor]:
    steps = len(tensors) // 2
    layout = DocumentLayout((0, 5, 6, 13), rows)
    asked = [t if rows is None or i in (1, 1 + steps) else t[rows] for i, t in enumerate(tensors)]
    keys, values = asked[1 : 1 + steps], asked[1 + steps :]
    out = ttt_attention(
        asked[0], keys, values, layout, implementation=implementation, window=window
    )
    # Unequal weights, so that a permuted axis cannot pass.
    weights = torch.arange(out.numel(), device=out.device).reshape(out.shape).sin().to(out.dtype)
    return [out, *torch.autograd.grad(out, tensors, weights)]


@pytest.mark.usefixtures("varlen_on_cpu")
@pytest.mark.parametrize("window", [None, 1, 4], ids=lambda w: f"window_{w}")
@pytest.mark.parametrize("step", [0, 3])
def test_one_call_path_equals_reference(window: int | None, step: int) -> None:
    tensors = _inputs("cpu", torch.float32, step)
    for rows in (None, torch.tensor([1, 2, 5, 9, 11])):
        expected = _run(tensors, "reference", window, rows)
        found = _run(tensors, "merged", window, rows)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 4], ids=lambda w: f"window_{w}")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_shapes_and_dtypes_on_the_meta_device(dtype: torch.dtype, window: int | None) -> None:
    tensors = _inputs("meta", dtype, step=2)
    results = _run(tensors, "merged", window)
    for result, tensor in zip(results, [tensors[0], *tensors], strict=True):
        assert result.is_meta
        assert (result.shape, result.dtype) == (tensor.shape, dtype)


def test_operator_returns_lse_by_head_then_row() -> None:
    query, key, value = (t.detach() for t in _inputs("meta", torch.bfloat16, step=0))
    _, lse = flash.varlen_forward(
        query, key, value, flash.Band(DocumentLayout((0, 5, 13)), reach=None)
    )
    assert lse.shape == (13, 4)
    assert lse.dtype == torch.float32


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((3, 2, 64), torch.bfloat16, True),
        ((3, 2, 256), torch.float16, True),
        ((3, 2, 60), torch.bfloat16, False),
        ((3, 2, 264), torch.bfloat16, False),
        ((3, 2, 64), torch.float32, False),
    ],
    ids=["head_64", "head_256", "head_60", "head_264", "float32"],
)
def test_what_the_one_call_operator_takes(
    shape: tuple[int, ...], dtype: torch.dtype, expected: bool
) -> None:
    assert flash.supports(torch.empty(shape, dtype=dtype, device="meta")) is expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 1, 4], ids=lambda w: f"window_{w}")
@pytest.mark.parametrize("step", [0, 3])
def test_cuda_operator_stays_near_float64(window: int | None, step: int) -> None:
    tensors = _inputs("cuda", torch.bfloat16, step)
    exact = _run([t.double().detach().requires_grad_() for t in tensors], "reference", window)
    for truth, value in zip(exact, _run(tensors, "merged", window), strict=True):
        assert (value.double() - truth).norm() <= 2e-2 * truth.norm()
