"""TTT attention: the drawing, the window, both implementations against each other and by hand."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eagle3.errors import ConfigError
from eagle3.names import AttentionImpl
from eagle3.ops.ttt_attention import IMPLEMENTATIONS, DocumentLayout, ttt_attention
from eagle3.ops.ttt_attention.flash import Band, backward, forward
from eagle3.ops.ttt_attention.reference import attend, attend_by_document

LAYOUTS = {
    "one_document": (0, 9),
    "several": (0, 5, 6, 13),
    "single_rows": (0, 1, 2, 3),
}
HEADS = {"mha": (3, 3), "gqa": (6, 2), "mqa": (4, 1)}


def _inputs(
    rows: int, heads: tuple[int, int], step: int, dtype: torch.dtype = torch.float64, dim: int = 8
) -> list[Tensor]:
    """Query, then keys, then values of steps 0..step, all requiring gradients."""
    generator = torch.Generator().manual_seed(rows + 10 * step)
    counts = [heads[0]] + [heads[1]] * (2 * (step + 1))
    tensors = [torch.randn(rows, h, dim, generator=generator, dtype=torch.float64) for h in counts]
    return [t.to(dtype).requires_grad_() for t in tensors]


def _run(
    tensors: list[Tensor],
    row_starts: tuple[int, ...],
    implementation: str,
    window: int | None,
) -> Tensor:
    steps = len(tensors) // 2
    return ttt_attention(
        tensors[0],
        tensors[1 : 1 + steps],
        tensors[1 + steps :],
        DocumentLayout(row_starts),
        implementation=implementation,
        window=window,
    )


def _value_and_gradients(
    tensors: list[Tensor],
    row_starts: tuple[int, ...],
    implementation: str,
    window: int | None = None,
    upstream: Tensor | None = None,
) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = _run(leaves, row_starts, implementation, window)
    if upstream is None:
        generator = torch.Generator().manual_seed(1)
        upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def _by_hand(tensors: list[Tensor], row_starts: tuple[int, ...], window: int | None) -> Tensor:
    """Softmax over the keys listed one by one with their token positions, as the drawing says."""
    steps = len(tensors) // 2
    query, keys, values = tensors[0], tensors[1 : 1 + steps], tensors[1 + steps :]
    group = query.shape[1] // keys[0].shape[1]
    out = torch.zeros_like(query)
    for start, stop in pairwise(row_starts):
        for row in range(start, stop):
            keyed = [(0, j, j - start) for j in range(start, row + 1)]
            keyed += [(t, row, row - start + t) for t in range(1, steps)]
            position = row - start + steps - 1
            seen = [(t, j) for t, j, at in keyed if window is None or position - at < window]
            for head in range(query.shape[1]):
                kv = head // group
                score = [query[row, head] @ keys[t][j, kv] / query.shape[2] ** 0.5 for t, j in seen]
                weight = torch.softmax(torch.stack(score), 0)
                value = torch.stack([values[t][j, kv] for t, j in seen])
                out[row, head] = weight @ value
    return out


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [None, 4, 2], ids=lambda w: f"window_{w}")
@pytest.mark.parametrize("step", [0, 2, 4])
def test_equals_keys_listed_by_hand(implementation: str, window: int | None, step: int) -> None:
    tensors = [t.detach() for t in _inputs(13, (4, 2), step)]
    row_starts = LAYOUTS["several"]
    expected = _by_hand(tensors, row_starts, window)
    torch.testing.assert_close(_run(tensors, row_starts, implementation, window), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_window_keeps_the_keys_of_the_drawing(implementation: str) -> None:
    """Row 3 at step 2 with window 4 sees k2, k3 and its own keys of steps 1 and 2."""
    tensors = _inputs(4, (1, 1), step=2)
    out = _run(tensors, (0, 4), implementation, window=4)
    grads = torch.autograd.grad(out[3].sum(), tensors)
    seen = [grad[:, 0].abs().sum(-1) > 0 for grad in grads[4:]]
    assert [rows.tolist() for rows in seen] == [
        [False, False, True, True],
        [False, False, False, True],
        [False, False, False, True],
    ]


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("row_starts", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("window", [None, 1, 3, 5, 100], ids=lambda w: f"window_{w}")
def test_merged_equals_reference_in_value_and_every_gradient(
    heads: tuple[int, int], row_starts: tuple[int, ...], window: int | None
) -> None:
    for step in range(7):
        tensors = _inputs(row_starts[-1], heads, step)
        expected = _value_and_gradients(tensors, row_starts, "reference", window)
        found = _value_and_gradients(tensors, row_starts, "merged", window)
        told = f"step {step}: {{}}".format
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12, msg=told)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [None, 2], ids=lambda w: f"window_{w}")
@pytest.mark.parametrize("step", [0, 3])
def test_gradcheck(implementation: str, window: int | None, step: int) -> None:
    tensors = _inputs(6, (2, 1), step, dim=4)

    def attention(*inputs: Tensor) -> Tensor:
        return _run(list(inputs), (0, 1, 6), implementation, window)

    assert torch.autograd.gradcheck(attention, tensors)


@pytest.mark.parametrize("window", [37, 300, 700], ids=lambda w: f"window_{w}")
def test_window_over_several_blocks_of_a_long_document(window: int) -> None:
    """Longer than one masked block, with whole key blocks hidden from some rows."""
    row_starts = (0, 3, 1203, 1400)
    tensors = _inputs(1400, (2, 1), step=2)
    expected = _value_and_gradients(tensors, row_starts, "reference", window)
    found = _value_and_gradients(tensors, row_starts, "merged", window)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("window", [None, 40], ids=lambda w: f"window_{w}")
@pytest.mark.parametrize(
    ("dtype", "worst"),
    [(torch.float32, 5e-6), (torch.bfloat16, 2e-2)],
    ids=["float32", "bfloat16"],
)
def test_lower_precision_stays_near_float64(
    dtype: torch.dtype, worst: float, window: int | None
) -> None:
    """Norm of the error over the norm of the truth, for the output and every gradient.

    bfloat16 rounds at 2^-9 = 2e-3; the output is rounded twice, gradients pass a few more.
    """
    row_starts = (0, 90, 91, 257)
    tensors = _inputs(257, (8, 2), step=3, dtype=dtype, dim=32)
    exact = _value_and_gradients([t.double() for t in tensors], row_starts, "reference", window)
    found = _value_and_gradients(tensors, row_starts, "merged", window)
    for truth, value in zip(exact, found, strict=True):
        assert value.dtype == dtype
        assert torch.linalg.vector_norm(value.double() - truth) <= worst * truth.norm()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("step", [0, 3])
def test_packed_equals_each_document_alone(implementation: str, step: int) -> None:
    row_starts = LAYOUTS["several"]
    tensors = _inputs(13, (4, 2), step)
    packed = _value_and_gradients(
        tensors, row_starts, implementation, upstream=torch.ones(13, 4, 8)
    )
    for start, stop in pairwise(row_starts):
        part = [t.detach()[start:stop] for t in tensors]
        ones = torch.ones(stop - start, 4, 8)
        alone = _value_and_gradients(part, (0, stop - start), implementation, upstream=ones)
        torch.testing.assert_close([t[start:stop] for t in packed], alone)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [None, 2], ids=lambda w: f"window_{w}")
def test_no_rows_give_an_empty_result_with_a_graph(implementation: str, window: int | None) -> None:
    tensors = [torch.ones(1, 2, 8, requires_grad=True) for _ in range(7)]
    out = _run([t[:0] for t in tensors], (0,), implementation, window)
    assert out.shape == (0, 2, 8)
    grads = torch.autograd.grad(out.sum(), tensors)
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("score", [3e2, -3e2], ids=["own_key_wins", "own_key_vanishes"])
def test_saturated_scores_stay_finite(implementation: str, score: float) -> None:
    tensors = [t.detach() for t in _inputs(9, (2, 1), 1, dtype=torch.float32)]
    tensors[0].fill_(score)
    tensors[2].fill_(10.0)
    results = _value_and_gradients(tensors, (0, 9), implementation)
    assert all(torch.isfinite(t).all() for t in results)
    expected = _value_and_gradients([t.double() for t in tensors], (0, 9), "reference")
    torch.testing.assert_close([t.double() for t in results], expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("upstream", ["expanded", "transposed"])
def test_strided_inputs_and_upstream_gradients(upstream: str) -> None:
    """Views whose last axis is not contiguous: the CPU operator would misread them silently."""
    dense = _inputs(13, (4, 2), step=1)
    strided = [t.detach().permute(2, 0, 1).contiguous().permute(1, 2, 0) for t in dense]
    assert all(t.stride(-1) != 1 for t in strided)
    grad = torch.ones((), dtype=torch.float64).expand(13, 4, 8)
    if upstream == "transposed":
        grad = torch.randn(8, 4, 13, dtype=torch.float64).permute(2, 1, 0)
    leaves = [t.requires_grad_() for t in strided]
    out = _run(leaves, (0, 5, 13), "merged", None)
    found = [out, *torch.autograd.grad(out, leaves, grad)]
    expected = _value_and_gradients(dense, (0, 5, 13), "reference", upstream=grad)
    torch.testing.assert_close([t.detach() for t in found], expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_autocast_casts_like_the_attention_of_pytorch(implementation: str) -> None:
    mixed = _inputs(9, (2, 1), 1, dtype=torch.float32)
    rounded = [t.detach().bfloat16() for t in mixed]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = _run([*mixed[:3], *rounded[3:]], (0, 9), implementation, None)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, _run(rounded, (0, 9), implementation, None))
    out.sum().backward()
    assert mixed[0].grad is not None
    assert mixed[0].grad.dtype == torch.float32


@pytest.mark.parametrize("window", [None, 3], ids=lambda w: f"window_{w}")
def test_reference_by_document_equals_reference(window: int | None) -> None:
    """The fallback where no flash operator fits."""
    tensors = _inputs(13, (4, 2), step=2)
    args = (tensors[0], tensors[1:4], tensors[4:], DocumentLayout(LAYOUTS["several"]), window)
    torch.testing.assert_close(attend_by_document(*args), attend(*args))


def test_merged_saves_inputs_output_and_lse_only() -> None:
    tensors = _inputs(64, (4, 2), step=2)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        _run(tensors, (0, 20, 64), "merged", None)
    shapes = sorted(tuple(t.shape) for t in saved)
    assert shapes == sorted([(64, 4, 8)] * 2 + [(64, 4)] + [(64, 2, 8)] * 6)


class _LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operator returned."""

    numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [t.numel() for t in tree_leaves(result) if isinstance(t, Tensor)]
        self.numel = max(self.numel, *made) if made else self.numel
        return result


@pytest.mark.parametrize("window", [None, 50], ids=lambda w: f"window_{w}")
def test_merged_never_makes_a_rows_by_rows_matrix(window: int | None) -> None:
    """Neither over the pack nor over a document: nothing exceeds a few query tensors or blocks."""
    rows, step = 2400, 3
    tensors = _inputs(rows, (2, 1), step, dtype=torch.float32)
    with _LargestTensor() as largest:
        _run(tensors, (0, 700, 701, rows), "merged", window).sum().backward()
    assert largest.numel <= max(rows * 2 * 8, 256 * (256 + 50))
    assert largest.numel < rows**2 / 50


def test_backward_can_not_be_differentiated_again() -> None:
    tensors = _inputs(5, (1, 1), step=1)
    out = _run(tensors, (0, 5), "merged", None)
    (grad,) = torch.autograd.grad(out.square().sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_flash_backward_takes_a_larger_log_sum_exp() -> None:
    """The property the merge rests on: probabilities are exp(score - lse), whatever lse is."""
    query, key, value = (t.detach() for t in _inputs(7, (2, 2), step=0))
    band = Band(DocumentLayout((0, 7)), reach=None)
    out, lse = forward(query, key, value, band)
    grad_out = torch.ones_like(out)
    half = backward(
        grad_out, query, key, value, 0.5 * out, lse + torch.log(torch.tensor(2.0)), band
    )
    full = backward(grad_out, query, key, value, out, lse, band)
    torch.testing.assert_close(half.value, 0.5 * full.value)


def _ids(*ids: int) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def test_layout_from_document_ids() -> None:
    layout = DocumentLayout.from_document_ids(_ids(4, 4, 0, 7, 7, 7))
    assert layout == DocumentLayout((0, 2, 3, 6))
    assert DocumentLayout.from_document_ids(_ids()) == DocumentLayout((0,))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DocumentLayout.from_document_ids(_ids(0, -1)), "padding"),
        (lambda: DocumentLayout.from_document_ids(_ids(0, 1, 0)), "contiguous"),
        (lambda: DocumentLayout((0, 3, 3)), "at least one row"),
        (lambda: DocumentLayout((1, 3)), "row 0"),
    ],
    ids=["padding", "interleaved", "empty_document", "late_start"],
)
def test_layout_refuses(make: Callable[[], DocumentLayout], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        make()


def test_unknown_implementation_lists_the_names() -> None:
    with pytest.raises(ConfigError, match=r"'flex'; expected one of reference, sdpa, merged"):
        _run(_inputs(3, (1, 1), 0), (0, 3), "flex", None)


def test_window_must_hold_a_token() -> None:
    with pytest.raises(ConfigError, match=r"sliding_window: found 0, expected at least 1"):
        _run(_inputs(3, (1, 1), 0), (0, 3), "merged", 0)


def test_names_are_those_of_the_configuration() -> None:
    assert set(IMPLEMENTATIONS) == set(AttentionImpl)
