"""What ``test_kernels`` runs in a process of its own: kernels of rows against plain PyTorch.

On CPU under ``TRITON_INTERPRET=1``, else on the CUDA device. The interpreter truncates where it
rounds to bfloat16; devices round to nearest.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle3.ops import kernels
from eagle3.ops.distillation import reference
from eagle3.ops.distillation.rows import RowStatistics
from eagle3.ops.distillation.triton_rows import row_statistics
from tests.ops.test_distillation import HARD_ROWS

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
MIXES = {
    **{name: [(name, 0.7)] for name in reference.DIVERGENCES},
    "all": [(name, 0.3 + 0.1 * place) for place, name in enumerate(reference.DIVERGENCES)],
    "named_twice": [("kl", 0.2), ("tv", 0.0), ("kl", 0.5)],
}
TARGETS = [0, 4, 2, 2, 1, 3, 0]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers, the same for every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def _logits(width: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Draft and verifier logits of :data:`TARGETS`, and weights of both signs."""
    draft, verifier = 2 * random(len(TARGETS), width, seed=1), 2 * random(5, width, seed=2)
    return draft.to(dtype), verifier.to(dtype), torch.linspace(-1, 2, len(TARGETS), device=DEVICE)


def _expected(
    draft: Tensor, verifier: Tensor, mix: list[tuple[str, float]], weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Losses, and the gradient of their weighted sum, by autograd."""
    draft = draft.detach().clone().requires_grad_()
    loss = reference.mixed_loss(draft, verifier, mix)
    return loss.detach(), torch.autograd.grad((weights.to(loss.dtype) * loss).sum(), draft)[0]


def _found(
    draft: Tensor,
    verifier: Tensor,
    targets: list[int],
    mix: list[tuple[str, float]],
    weights: Tensor,
) -> tuple[RowStatistics, Tensor]:
    """Statistics with overlap, and the gradient, of a copy whose rows lie apart."""
    apart = draft.new_full((draft.shape[0], draft.shape[1] + 3), 7.0)
    logits = apart[:, :-3].copy_(draft)
    found = row_statistics(
        logits,
        verifier,
        torch.tensor(targets, dtype=torch.int64, device=DEVICE),
        mix,
        weights=weights,
        with_overlap=True,
    )
    assert bool((apart[:, -3:] == 7).all()), "wrote beyond the vocabulary"
    return found, logits


class _Loss(torch.autograd.Function):
    """The weighted sum of losses, with the gradient the kernel leaves in the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, verifier: Tensor, targets: Tensor, mix: Any) -> Tensor:
        gradient = logits.clone()
        weights = torch.ones(len(targets), dtype=logits.dtype, device=logits.device)
        loss = row_statistics(gradient, verifier, targets, mix, weights=weights).loss
        ctx.save_for_backward(gradient)
        return loss.sum()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        return slope * ctx.saved_tensors[0], None, None, None


def test_kernels_are_available() -> None:
    assert kernels.available(torch.empty(0, device=DEVICE))


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("width", [37, 8192 + 813], ids=["one_block", "two_blocks"])
def test_rows_equal_the_reference(width: int, mix: list[tuple[str, float]]) -> None:
    draft, verifier, weights = _logits(width)
    loss, gradient = _expected(draft, verifier[TARGETS], mix, weights)
    found, written = _found(draft, verifier, TARGETS, mix, weights)
    torch.testing.assert_close(found.loss, loss, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(written, gradient, rtol=1e-10, atol=1e-14)
    assert torch.equal(found.draft_best, draft.argmax(-1))
    overlap = reference.Distributions(draft, verifier[TARGETS]).overlap
    torch.testing.assert_close(found.overlap, overlap, rtol=1e-10, atol=0)


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_gradients_reach_both_factors_of_the_logits(mix: list[tuple[str, float]]) -> None:
    hidden, head = random(7, 6, seed=3).requires_grad_(), random(37, 6, seed=4).requires_grad_()
    verifier, targets = _logits(37)[1], torch.tensor(TARGETS, device=DEVICE)
    loss = 0.5 * _Loss.apply(hidden @ head.t(), verifier, targets, mix)
    expected = 0.5 * reference.mixed_loss(hidden @ head.t(), verifier[targets], mix).sum()
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(loss, (hidden, head)),
        torch.autograd.grad(expected, (hidden, head)),
        rtol=1e-10,
        atol=1e-12,
    )


@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)],
    ids=["float32", "float16", "bfloat16"],
)
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_rows_compute_in_float32(
    mix: list[tuple[str, float]], dtype: torch.dtype, rtol: float
) -> None:
    draft, verifier, weights = _logits(300, dtype)
    loss, gradient = _expected(draft.double(), verifier[TARGETS].double(), mix, weights)
    found, written = _found(draft, verifier, TARGETS, mix, weights)
    assert (found.loss.dtype, written.dtype) == (torch.float32, dtype)
    torch.testing.assert_close(found.loss.double(), loss, rtol=1e-5, atol=1e-6)
    # float16 counts in steps of 6e-8 below 6e-5
    torch.testing.assert_close(written.double(), gradient, rtol=rtol, atol=2e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("logits", HARD_ROWS.values(), ids=HARD_ROWS)
def test_hard_rows(logits: tuple[list[float], list[float]], dtype: torch.dtype) -> None:
    """Saturated, excluded, or both; what is infinite in theory depends on the dtype's range."""
    draft = torch.tensor([logits[0]], dtype=dtype, device=DEVICE)
    verifier = torch.tensor([logits[1]], dtype=dtype, device=DEVICE)
    weights = torch.full((1,), 0.5, device=DEVICE)
    for name in reference.DIVERGENCES:
        found, written = _found(draft, verifier, [0], [(name, 0.7)], weights)
        exact = (draft.double(), verifier.double()) if found.loss < 1e30 else (draft, verifier)
        loss, gradient = _expected(*exact, [(name, 0.7)], weights)
        told = f"{name}: {{}}".format
        torch.testing.assert_close(found.loss, loss.to(dtype), msg=told)
        torch.testing.assert_close(written, gradient.to(dtype), rtol=1e-5, atol=1e-6, msg=told)


def test_a_common_offset_costs_no_precision() -> None:
    """At 1e4 float32 has three decimals, too few for a log-sum-exp with the offset in it."""
    draft, verifier, weights = _logits(37)
    draft, verifier = (1e4 + draft).float(), (1e4 + verifier).float()
    loss, gradient = _expected(draft.double(), verifier[TARGETS].double(), MIXES["all"], weights)
    found, written = _found(draft, verifier, TARGETS, MIXES["all"], weights)
    torch.testing.assert_close(found.loss, loss.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(written, gradient.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_a_verifier_that_excludes_whole_blocks(mix: list[tuple[str, float]]) -> None:
    draft, verifier, weights = _logits(2 * 8192 + 5)
    verifier[:, :8192] = -math.inf
    verifier[1:, -7:] = -math.inf
    draft[:, :8192] -= 60
    loss, gradient = _expected(draft, verifier[TARGETS], mix, weights)
    found, written = _found(draft, verifier, TARGETS, mix, weights)
    assert torch.isfinite(written).all()
    torch.testing.assert_close(found.loss, loss, rtol=1e-10, atol=0)
    torch.testing.assert_close(written, gradient, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_ties_of_both_distributions(mix: list[tuple[str, float]]) -> None:
    """Equal logits are equal probabilities: half of the subgradient, or none.

    Odd rows are tied everywhere. Even rows have columns changed about, and sums in another order
    may round otherwise; so their logits are of two kinds, whose exponentials add up without error.
    """
    _, verifier, weights = _logits(37)
    verifier[:3] = torch.where(verifier[:3] > 0, 1.5, -800.0)
    verifier[:3, 3], verifier[:3, 8] = 1.5, -800.0
    draft = verifier[TARGETS].clone()
    draft[::2, 3:9] = draft[::2, 3:9].flip(-1)
    assert bool((draft[::2] != verifier[TARGETS[::2]]).any(-1).all())
    loss, gradient = _expected(draft, verifier[TARGETS], mix, weights)
    found, written = _found(draft, verifier, TARGETS, mix, weights)
    torch.testing.assert_close(found.loss, loss, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(written, gradient, rtol=1e-10, atol=1e-14)


def test_the_first_of_equal_logits_is_best() -> None:
    draft, verifier, weights = _logits(9000)
    places = [[8999], [8191, 8192], [5, 8999], [0, 1], [17, 18], [8192, 8193], [0, 8999]]
    for row, at in enumerate(places):
        draft[row, at] = 50.0
    verifier[:, [4, 8500]] = 50.0
    loss, _ = _expected(draft, verifier[TARGETS], [("ce", 1.0)], weights)
    found, _ = _found(draft, verifier, TARGETS, [("ce", 1.0)], weights)
    assert found.draft_best.tolist() == [min(at) for at in places]
    torch.testing.assert_close(found.loss, loss)


def test_without_weights_the_logits_stay() -> None:
    draft, verifier, _ = _logits(37)
    before = draft.clone()
    found = row_statistics(draft, verifier, torch.tensor(TARGETS, device=DEVICE), MIXES["all"])
    assert torch.equal(draft, before)
    assert found.overlap is None
    loss = reference.mixed_loss(draft, verifier[TARGETS], MIXES["all"])
    torch.testing.assert_close(found.loss, loss, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_rows_of_weight_zero_get_exact_zeros() -> None:
    """Also where a loss is beyond any float."""
    draft, verifier, _ = _logits(37, torch.float32)
    verifier[:, 3] = -math.inf
    mix = [("reverse_kl", 1000.0), ("kl", 1.0)]
    found, written = _found(draft, verifier, TARGETS, mix, torch.zeros(7, device=DEVICE))
    assert bool(found.loss.isinf().any())
    assert torch.equal(written, torch.zeros_like(written))


def test_no_rows() -> None:
    found, written = _found(
        torch.empty(0, 9, device=DEVICE), torch.empty(0, 9, device=DEVICE), [],
        MIXES["kl"], torch.empty(0, device=DEVICE),
    )  # fmt: skip
    assert found.loss.shape == found.draft_best.shape == (0,)
    assert found.overlap is not None
    assert written.shape == (0, 9)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 10_000),
    scale=st.floats(0.01, 30.0),
    width=st.integers(2, 70),
    mix=st.lists(
        st.tuples(st.sampled_from(list(reference.DIVERGENCES)), st.floats(0.1, 3)), min_size=1
    ),
)
def test_any_mix_of_any_rows(
    seed: int, scale: float, width: int, mix: list[tuple[str, float]]
) -> None:
    draft, verifier = scale * random(7, width, seed=seed), scale * random(5, width, seed=seed + 1)
    weights = random(7, seed=seed + 2)
    loss, gradient = _expected(draft, verifier[TARGETS], mix, weights)
    found, written = _found(draft, verifier, TARGETS, mix, weights)
    torch.testing.assert_close(found.loss, loss, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(written, gradient, rtol=1e-9, atol=1e-11)


@pytest.mark.skipif(not INTERPRETED, reason="its logits lie in a file, mostly a hole")
def test_rows_beyond_32_bits(tmp_path: Path) -> None:
    """Element 2**31 is the first of row 2."""
    stride, width = 2**30, 37
    path = tmp_path / "logits"
    path.touch()
    size = 2 * stride + width
    flat = torch.from_file(str(path), shared=True, size=size, dtype=torch.float16)
    far = flat.as_strided((3, width), (stride, 1))
    draft, verifier, weights = (t[:3] for t in _logits(width, torch.float16))
    far.copy_(draft)
    found = row_statistics(
        far, verifier, torch.tensor([2, 1, 0]), MIXES["kl"], weights=weights, with_overlap=True
    )
    near, written = _found(draft, verifier, [2, 1, 0], MIXES["kl"], weights)
    assert torch.equal(found.loss, near.loss)
    assert torch.equal(far, written)
