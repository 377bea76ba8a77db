"""The loss of a chain: the deferred pass against the plain one, in values and every gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eagle3.errors import ConfigError
from eagle3.names import LossImpl
from eagle3.ops.distillation import IMPLEMENTATIONS, LOSSES, ChainLoss, chain_loss, deferred
from eagle3.ops.distillation.rows import ChainSteps, DraftHead, JudgedRows

HIDDEN, VOCAB = 6, 23


@dataclass
class Case:
    """``rows`` computed rows of which each step judges some, against ``targets`` verifier rows."""

    hidden: list[Tensor]
    norm_weight: Tensor
    weight: Tensor
    verifier: Tensor
    steps: ChainSteps
    weights: Tensor

    @classmethod
    def make(
        cls, rows: int, steps: int, share: float, seed: int, dtype: torch.dtype = torch.float64
    ) -> Case:
        """Step s judges row i against target i + s, where the target's gate is on."""
        g = torch.Generator().manual_seed(seed)
        gates = (torch.rand(rows, generator=g) < share).nonzero()[:, 0]
        judged = []
        for step in range(steps):
            targets = torch.arange(len(gates))[gates >= step]
            judged.append(JudgedRows(gates[targets] - step, targets))
        shapes = [(rows, HIDDEN)] * steps + [(HIDDEN,), (VOCAB, HIDDEN), (rows, VOCAB)]
        made = [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]
        *hidden, norm_weight, weight, verifier = (t.to(dtype) for t in made)
        leaves = [t.requires_grad_() for t in (*hidden, norm_weight, weight)]
        step_weights = torch.rand(steps, generator=g, dtype=torch.float64)
        return cls(
            leaves[:steps], *leaves[steps:], 2 * verifier,
            ChainSteps(tuple(judged), gates), step_weights,
        )  # fmt: skip

    @property
    def leaves(self) -> list[Tensor]:
        return [t for t in (*self.hidden, self.norm_weight, self.weight) if t.requires_grad]

    def run(self, implementation: str, **options: Any) -> ChainLoss:
        options = {"weights": self.weights, "mix": [("kl", 1.0)], "with_overlap": True} | options
        head = DraftHead(
            lambda rows: F.rms_norm(rows, (HIDDEN,), self.norm_weight.to(rows.dtype), 1e-5),
            self.norm_weight,
            self.weight,
        )
        logits = options.pop("verifier_logits", lambda rows: self.verifier[rows])
        return chain_loss(
            self.hidden, self.steps, head, logits, implementation=implementation, **options
        )

    def everything(self, implementation: str, **options: Any) -> list[Tensor]:
        """Loss, statistics, then every gradient, for an upstream gradient other than one."""
        found = self.run(implementation, **options)
        values = [found.loss.detach()]
        for step in found.steps:
            values += [step.losses, step.draft_best, step.verifier_best, step.overlap]  # type: ignore[list-item]
        return values + list(torch.autograd.grad(3 * found.loss, self.leaves))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four target rows a chunk at three steps in float64."""
    monkeypatch.setitem(deferred.CHUNK_BYTES, "cpu", 3 * 4 * VOCAB * 8)


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_equals_the_reference(name: str) -> None:
    case = Case.make(rows=29, steps=3, share=0.6, seed=1)
    mix = [(name, 0.7)]
    close(case.everything("deferred", mix=mix), case.everything("reference", mix=mix))


def test_a_mix_equals_the_reference() -> None:
    case = Case.make(rows=29, steps=4, share=0.6, seed=2)
    mix = [("kl", 0.4), ("tv", 0.0), ("nla", 0.3), ("lk_hybrid", 1.0)]
    close(case.everything("deferred", mix=mix), case.everything("reference", mix=mix))


@settings(max_examples=40)
@given(
    rows=st.integers(1, 40),
    steps=st.integers(1, 7),
    share=st.floats(0.0, 1.0),
    seed=st.integers(0, 999),
)
def test_any_mask_and_any_number_of_steps(rows: int, steps: int, share: float, seed: int) -> None:
    """Holes, chunks that end anywhere, steps without a row, no row at all."""
    case = Case.make(rows, steps, share, seed)
    close(case.everything("deferred"), case.everything("reference"))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_rows_give_exact_zeros_with_a_graph(implementation: str) -> None:
    case = Case.make(rows=5, steps=3, share=0.0, seed=3)
    found = case.run(implementation)
    assert float(found.loss.detach()) == 0.0
    assert [step.losses.shape for step in found.steps] == [(0,)] * 3
    grads = torch.autograd.grad(found.loss, case.leaves)
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_frozen_head_gets_no_gradient(implementation: str) -> None:
    case = Case.make(rows=17, steps=2, share=0.7, seed=4)
    expected = case.everything("reference")
    case.weight.requires_grad_(False)
    close(case.everything(implementation), expected[:-1])
    assert case.weight.grad is None


def test_validation_makes_the_same_statistics_without_gradients() -> None:
    case = Case.make(rows=21, steps=3, share=0.7, seed=5)
    trained = case.run("deferred").steps
    for options in ({"weights": None}, {}):
        with torch.no_grad():
            found = case.run("deferred", **options)
        assert not found.loss.requires_grad
        for step, wanted in zip(found.steps, trained, strict=True):
            torch.testing.assert_close(vars(step), vars(wanted))
    assert float(case.run("deferred", weights=None).loss) == 0.0


def test_overlap_is_made_where_asked_for() -> None:
    case = Case.make(rows=9, steps=2, share=0.9, seed=6)
    for implementation in IMPLEMENTATIONS:
        found = case.run(implementation, with_overlap=False)
        assert [step.overlap for step in found.steps] == [None, None]


def test_gradients_are_handed_out_once() -> None:
    case = Case.make(rows=9, steps=2, share=0.9, seed=7)
    loss = case.run("deferred").loss
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="handed out before"):
        loss.backward()


def test_verifier_logits_are_made_once_a_target_row() -> None:
    case = Case.make(rows=40, steps=3, share=0.5, seed=8)
    asked: list[Tensor] = []

    def logits(rows: Tensor) -> Tensor:
        asked.append(rows)
        return case.verifier[rows]

    case.run("deferred", verifier_logits=logits)
    assert len(asked) > 3
    assert max(len(rows) for rows in asked) <= 4
    assert torch.equal(torch.cat(asked), case.steps.verifier_rows)


class _Products(TorchDispatchMode):
    """Rows of every product with the head, and the most elements any operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.largest = 0, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        self.largest = max([self.largest, *(t.numel() for t in made)])
        if func is torch.ops.aten.mm.default and made[0].shape[1] == VOCAB:
            self.rows += made[0].shape[0]
        return result


def test_only_supervised_rows_meet_the_head_and_no_chunk_outlives_another() -> None:
    """A tenth of the rows is supervised; nothing as large as rows x V is made."""
    case = Case.make(rows=400, steps=3, share=0.1, seed=9)
    case.verifier = case.verifier.detach()
    with _Products() as products:
        case.run("deferred", with_overlap=False).loss.backward()
    assert products.rows == sum(len(step.targets) for step in case.steps.rows) < 400
    assert products.largest <= max(12 * VOCAB, 400 * HIDDEN)


@pytest.mark.parametrize("trained", [True, False], ids=["head_trained", "head_frozen"])
def test_autocast_multiplies_in_bfloat16_and_sums_in_float32(trained: bool) -> None:
    case = Case.make(rows=300, steps=3, share=0.8, seed=10, dtype=torch.float32)
    case.weight.requires_grad_(trained)
    exact = case.everything("reference")
    with torch.autocast("cpu", torch.bfloat16):
        found = case.run("deferred", verifier_logits=lambda rows: case.verifier[rows].bfloat16())
    assert found.loss.dtype == torch.float32
    torch.testing.assert_close(found.loss.detach(), exact[0], rtol=2e-2, atol=0)
    grads = torch.autograd.grad(3 * found.loss, case.leaves)
    for grad, leaf, truth in zip(grads, case.leaves, exact[-len(grads) :], strict=True):
        assert grad.dtype == leaf.dtype == torch.float32
        assert torch.linalg.vector_norm(grad - truth) < 2e-2 * truth.norm()


def test_unknown_implementation_lists_the_names() -> None:
    with pytest.raises(
        ConfigError, match=r"compute.loss: .*'cuda'; expected one of reference, def"
    ):
        Case.make(rows=3, steps=1, share=1.0, seed=0).run("cuda")


def test_names_are_those_of_the_configuration() -> None:
    assert set(IMPLEMENTATIONS) == set(LossImpl)


def test_a_bad_mix_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'kl'"):
        Case.make(rows=3, steps=1, share=1.0, seed=0).run("deferred", mix=[("k1", 1.0)])
