"""Distillation losses: definitions, gradients, hard rows, mixes, refusals."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eagle3.errors import ConfigError
from eagle3.ops.distillation import LOSSES, check_mix, closed_form, reference
from tests.ops.losses import ROW_LOSSES, Mix, overlap


@pytest.fixture(params=ROW_LOSSES)
def loss_of(request: pytest.FixtureRequest) -> Callable[[Tensor, Tensor, Mix], Tensor]:
    return ROW_LOSSES[request.param]


RowLoss = Callable[[Tensor, Tensor, Mix], Tensor]


def _logits(rows: int, vocab: int = 11, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draft logits (with gradient) and verifier logits, float64."""
    generator = torch.Generator().manual_seed(seed)
    draft, verifier = 2 * torch.randn(2, rows, vocab, generator=generator, dtype=torch.float64)
    return draft.requires_grad_(), verifier


def _definition(name: str, p: list[float], q: list[float]) -> float:
    """The loss of one row straight from its definition, in Python floats."""
    pairs = list(zip(p, q, strict=True))
    overlap = sum(min(a, b) for a, b in pairs)
    forward = sum(a * math.log(a / b) for a, b in pairs if a > 0)
    total_variation = sum(abs(a - b) for a, b in pairs) / 2
    weight = math.exp(-3 * overlap)
    middle = [(a + b) / 2 for a, b in pairs]
    return {
        "kl": forward,
        "reverse_kl": sum(b * math.log(b / a) for a, b in pairs),
        "js": sum(a * math.log(a / m) for a, m in zip(p, middle, strict=True)) / 2
        + sum(b * math.log(b / m) for b, m in zip(q, middle, strict=True)) / 2,
        "ce": -math.log(q[p.index(max(p))]),
        "tv": total_variation,
        "nla": -math.log(overlap),
        "lk_hybrid": weight * forward + (1 - weight) * total_variation,
    }[name]


@pytest.mark.parametrize("name", LOSSES)
def test_equals_its_definition(loss_of: RowLoss, name: str) -> None:
    draft, verifier = _logits(rows=7)
    found = loss_of(draft, verifier, [(name, 1.0)])
    p, q = verifier.softmax(-1).tolist(), draft.softmax(-1).tolist()
    expected = [_definition(name, p_row, q_row) for p_row, q_row in zip(p, q, strict=True)]
    torch.testing.assert_close(found.tolist(), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "lk_hybrid"])
def test_gradcheck(loss_of: RowLoss, name: str) -> None:
    draft, verifier = _logits(rows=4, vocab=6)
    assert torch.autograd.gradcheck(lambda logits: loss_of(logits, verifier, [(name, 0.7)]), draft)


def test_gradcheck_of_the_hybrid_with_its_weight_held(loss_of: RowLoss) -> None:
    """Its weight is a constant of the step, so only a fixed weight can be differenced."""
    draft, verifier = _logits(rows=4, vocab=6)
    weight = torch.exp(-3 * overlap(draft, verifier))

    def held(logits: Tensor) -> Tensor:
        kl = loss_of(logits, verifier, [("kl", 1.0)])
        return weight * kl + (1 - weight) * loss_of(logits, verifier, [("tv", 1.0)])

    assert torch.autograd.gradcheck(held, draft)
    upstream = torch.arange(1.0, 5.0, dtype=torch.float64)
    hybrid = loss_of(draft, verifier, [("lk_hybrid", 1.0)])
    torch.testing.assert_close(hybrid, held(draft))
    torch.testing.assert_close(
        torch.autograd.grad(hybrid, draft, upstream),
        torch.autograd.grad(held(draft), draft, upstream),
    )


def test_gradient_of_forward_kl_is_q_minus_p(loss_of: RowLoss) -> None:
    draft, verifier = _logits(rows=5)
    (grad,) = torch.autograd.grad(loss_of(draft, verifier, [("kl", 1.0)]).sum(), draft)
    torch.testing.assert_close(grad, draft.softmax(-1) - verifier.softmax(-1))


@pytest.mark.parametrize("name", LOSSES)
def test_no_gradient_reaches_the_verifier(loss_of: RowLoss, name: str) -> None:
    draft, verifier = _logits(rows=3)
    verifier.requires_grad_()
    loss_of(draft, verifier, [(name, 1.0)]).sum().backward()
    assert draft.grad is not None
    assert verifier.grad is None


@pytest.mark.parametrize("name", LOSSES)
def test_equal_distributions_cost_nothing(loss_of: RowLoss, name: str) -> None:
    """Except cross-entropy on the best token, which costs its own surprise."""
    _, verifier = _logits(rows=5)
    draft = (verifier + 3.0).requires_grad_()
    loss = loss_of(draft, verifier, [(name, 1.0)])
    surprise = -verifier.log_softmax(-1).amax(-1)
    expected = surprise if name == "ce" else torch.zeros(5, dtype=torch.float64)
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-12, atol=1e-12)


HARD_ROWS = {
    "both_sure_and_agree": ([1e4, 0.0, -1e4], [1e4, 0.0, -1e4]),
    "both_sure_and_disagree": ([1e4, 0.0, -1e4], [-1e4, 0.0, 1e4]),
    "verifier_sure": ([0.0, 0.0, 0.0], [5e3, -5e3, 0.0]),
    "drafter_sure": ([5e3, -5e3, 0.0], [0.0, 0.0, 0.0]),
    "verifier_excludes_tokens": ([0.5, 1.0, -1.0], [-math.inf, 1.0, -math.inf]),
    "excluded_and_never_drafted": ([-2e4, 1.0, 0.5], [-math.inf, 1.0, 0.0]),
    "sure_of_an_excluded_token": ([1e4, 0.0, 0.0], [-math.inf, 1.0, 0.5]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("logits", HARD_ROWS.values(), ids=HARD_ROWS)
@pytest.mark.parametrize("name", LOSSES)
def test_hard_rows_stay_finite(
    loss_of: RowLoss, name: str, logits: tuple[list[float], list[float]], dtype: torch.dtype
) -> None:
    draft = torch.tensor([logits[0]], dtype=dtype, requires_grad=True)
    verifier = torch.tensor([logits[1]], dtype=dtype)
    loss = loss_of(draft, verifier, [(name, 1.0)])
    (grad,) = torch.autograd.grad(loss.sum(), draft)
    drafted = draft.softmax(-1).detach() > 0
    if name == "reverse_kl" and bool((drafted & verifier.isneginf()).any()):
        assert loss.item() > 1e30, "infinite in theory"
        return
    assert torch.isfinite(loss).all()
    assert torch.isfinite(grad).all()
    assert loss.item() >= -1e-6


def test_excluded_tokens_count_as_zero_probability(loss_of: RowLoss) -> None:
    draft = torch.tensor([[0.5, 1.0, -1.0, 0.0]], dtype=torch.float64)
    verifier = torch.tensor([[1.0, -math.inf, 0.0, -math.inf]], dtype=torch.float64)
    p, q = verifier.softmax(-1)[0], draft.softmax(-1)[0]
    kl = sum(a * torch.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)
    torch.testing.assert_close(loss_of(draft, verifier, [("kl", 1.0)])[0], kl)
    overlap = torch.minimum(p, q).sum()
    for name, expected in (("tv", 1 - overlap), ("nla", -overlap.log())):
        torch.testing.assert_close(loss_of(draft, verifier, [(name, 1.0)])[0], expected)


@pytest.mark.parametrize("distance", [50.0, 1e3, 1e4])
def test_log_acceptance_counts_overlap_too_small_for_a_float(
    loss_of: RowLoss, distance: float
) -> None:
    """Two tokens: overlap is 2 exp(-distance), zero in float32 from distance 104 on."""
    draft = torch.tensor([[distance, 0.0]], requires_grad=True)
    verifier = torch.tensor([[0.0, distance]])
    loss = loss_of(draft, verifier, [("nla", 1.0)])
    torch.testing.assert_close(loss, torch.tensor([distance - math.log(2)]))
    (grad,) = torch.autograd.grad(loss.sum(), draft)
    # log p of 1e4 is spaced 1e-3 apart in float32
    torch.testing.assert_close(grad, torch.tensor([[0.5, -0.5]]), atol=1e-3, rtol=0)


@pytest.mark.parametrize("mix", [[("kl", 1.0)], [("ce", 0.1), ("tv", 0.9)]], ids=["one", "two"])
def test_no_rows_give_an_empty_loss_with_a_graph(
    loss_of: RowLoss, mix: list[tuple[str, float]]
) -> None:
    draft = torch.randn(3, 5, requires_grad=True)
    loss = loss_of(draft[:0], torch.randn(0, 5), mix)
    assert loss.shape == (0,)
    (grad,) = torch.autograd.grad(loss.sum(), draft)
    assert torch.equal(grad, torch.zeros(3, 5))


def test_a_mix_is_the_weighted_sum_of_its_terms(loss_of: RowLoss) -> None:
    draft, verifier = _logits(rows=6)
    weights = [(name, 0.25 * index) for index, name in enumerate(LOSSES)]
    singles = [w * loss_of(draft, verifier, [(name, 1.0)]) for name, w in weights]
    mixed = loss_of(draft, verifier, weights)
    torch.testing.assert_close(mixed, torch.stack(singles).sum(0))
    upstream = torch.linspace(-1, 2, 6, dtype=torch.float64)
    expected = torch.autograd.grad(torch.stack(singles).sum(0), draft, upstream)
    torch.testing.assert_close(torch.autograd.grad(mixed, draft, upstream), expected)


def test_terms_of_weight_zero_are_not_computed(
    loss_of: RowLoss, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(rows: object) -> Tensor:
        raise AssertionError("computed a term of weight 0")

    monkeypatch.setitem(reference.DIVERGENCES, "js", refuse)
    monkeypatch.setitem(closed_form.TERMS, "js", refuse)
    draft, verifier = _logits(rows=2)
    loss = loss_of(draft, verifier, [("js", 0.0), ("tv", 2.0)])
    torch.testing.assert_close(loss, 2 * loss_of(draft, verifier, [("tv", 1.0)]))


@pytest.mark.parametrize(
    ("draft_dtype", "verifier_dtype", "expected"),
    [
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float64, torch.float32, torch.float64),
    ],
    ids=["bfloat16", "mixed", "float64"],
)
@pytest.mark.parametrize("name", LOSSES)
def test_computes_in_float32_at_least(
    loss_of: RowLoss,
    name: str,
    draft_dtype: torch.dtype,
    verifier_dtype: torch.dtype,
    expected: torch.dtype,
) -> None:
    draft, verifier = _logits(rows=4)
    draft, verifier = draft.detach().to(draft_dtype).requires_grad_(), verifier.to(verifier_dtype)
    loss = loss_of(draft, verifier, [(name, 1.0)])
    assert loss.dtype == expected
    exact = loss_of(draft.double(), verifier.double(), [(name, 1.0)])
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-6)
    assert torch.autograd.grad(loss.sum(), draft)[0].dtype == draft_dtype


@given(seed=st.integers(0, 10_000), scale=st.floats(0.1, 30.0))
def test_losses_are_bounded_and_ordered(seed: int, scale: float) -> None:
    """0 <= TV <= 1, JS <= log 2, Pinsker's inequality, and 1 - TV = overlap."""
    draft, verifier = _logits(rows=5, seed=seed)
    draft, verifier = scale * draft.detach(), scale * verifier
    shared, slack = overlap(draft, verifier), 1e-9
    for loss_of in ROW_LOSSES.values():
        value = {name: loss_of(draft, verifier, [(name, 1.0)]) for name in LOSSES}
        assert all((loss >= -slack).all() for loss in value.values())
        assert (value["tv"] <= 1 + slack).all()
        assert (value["js"] <= math.log(2) + slack).all()
        assert (2 * value["tv"] ** 2 <= value["kl"] + slack).all()
        torch.testing.assert_close(1 - value["tv"], shared, rtol=0, atol=1e-10)
        torch.testing.assert_close(torch.exp(-value["nla"]), shared, rtol=1e-9, atol=1e-12)


def test_overlap_by_hand() -> None:
    verifier = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]).log().requires_grad_()
    draft = torch.tensor([[0.2, 0.7, 0.1], [0.1, 0.1, 0.8]]).log().requires_grad_()
    shared = overlap(draft, verifier)
    torch.testing.assert_close(shared, torch.tensor([0.2 + 0.3 + 0.1, 1.0]))
    assert not shared.requires_grad
    assert overlap(torch.empty(0, 5), torch.empty(0, 5)).shape == (0,)


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ([("k1", 1.0)], r"loss.mix\[0\].name: unknown loss 'k1'; did you mean 'kl'\?.*lk_hybrid"),
        ([("kl", 1.0), ("reverse-kl", 1.0)], r"mix\[1\].name: .* did you mean 'reverse_kl'"),
        ([("kl", -0.5)], r"mix\[0\].weight: found -0.5 for 'kl', expected a finite number"),
        ([("kl", math.nan)], "found nan"),
        ([("kl", math.inf)], "found inf"),
        ([("kl", 0.0), ("tv", 0.0)], "no term with a weight above 0"),
        ([], "no term with a weight above 0"),
    ],
    ids=["near", "second", "negative", "nan", "inf", "all_zero", "empty"],
)
def test_bad_mixes_are_refused(mix: list[tuple[str, float]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_mix(mix)
