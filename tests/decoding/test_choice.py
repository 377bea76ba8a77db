"""Rejection sampling gives the verifier's distribution, by algebra on the real functions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eagle3.decoding.choice import Greedy, Sampled, accepts, pick, processed, remainder
from eagle3.verifier.base import Sampling

WORDS = 6
weights = st.lists(st.sampled_from([0.0, 1e-9, 0.1, 0.5, 1.0, 4.0]), min_size=WORDS, max_size=WORDS)


def normalised(values: list[float]) -> Tensor:
    found = torch.tensor(values, dtype=torch.float64)
    return found / found.sum()


@given(weights.filter(any), weights.filter(any))
def test_accepted_and_replaced_tokens_make_up_p(first: list[float], second: list[float]) -> None:
    p, q = normalised(first), normalised(second)
    shares = []
    for token in range(WORDS):
        share = min(1.0, float(p[token] / q[token])) if q[token] > 0 else 0.0
        shares.append(share)
        if q[token] == 0:
            continue
        for chance, wanted in ((share * (1 - 1e-9), share > 0), (share * (1 + 1e-9), False)):
            if chance >= 1:
                continue
            found = accepts(
                p[None, None], q[None, None], torch.tensor([[token]]),
                torch.tensor([[chance]], dtype=torch.float64),
            )  # fmt: skip
            assert bool(found) == wanted
    kept = q * torch.tensor(shares, dtype=torch.float64)
    rest = remainder(p[None], q[None])[0]
    torch.testing.assert_close(kept + (1 - kept.sum()) * rest, p, rtol=0, atol=1e-9)


@given(weights.filter(any), st.floats(0, 1, exclude_max=True))
def test_a_token_without_probability_is_never_picked(values: list[float], chance: float) -> None:
    p = normalised(values)
    token = int(pick(p[None], torch.tensor([chance], dtype=torch.float64)))
    assert p[token] > 0
    before, total = float(p[:token].sum()), float(p[: token + 1].sum())
    assert before - 1e-12 <= chance <= total + 1e-12


def test_p_equal_to_q_takes_every_draft() -> None:
    p = normalised([1, 2, 3, 4, 5, 6])
    chance = torch.full((1, 1), 1 - 1e-12, dtype=torch.float64)
    for token in range(WORDS):
        assert bool(accepts(p[None, None], p[None, None], torch.tensor([[token]]), chance))
    torch.testing.assert_close(remainder(p[None], p[None])[0], p)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.3, 5, 1.0), (0.8, 0, 0.7), (0.9, 8, 0.95), (1.0, 1, 1.0)],
)
def test_probabilities_are_those_of_transformers(
    temperature: float, top_k: int, top_p: float
) -> None:
    from transformers import (
        LogitsProcessorList,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = torch.randn(40, 30, generator=torch.Generator().manual_seed(0)).double() * 3
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    wanted = warpers(torch.zeros(40, 1, dtype=torch.int64), logits.clone()).softmax(-1)
    found = processed(logits, Sampling(1, temperature, top_p, top_k))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_greedy_stops_at_the_first_difference() -> None:
    best = torch.tensor([[3, 1, 4], [3, 1, 4], [3, 1, 4]])
    logits = torch.nn.functional.one_hot(best, 6).float()
    drafts = torch.tensor([[3, 1], [3, 2], [0, 1]])
    verdict = Greedy().judge(logits, drafts, torch.arange(6))
    assert verdict.accepted.tolist() == [2, 1, 0]
    assert verdict.following.tolist() == [4, 1, 3]


def test_a_sequence_keeps_its_chance_when_others_leave() -> None:
    def draws(numbers: list[int], keep: list[int]) -> list[int]:
        chooser = Sampled(Sampling(1, temperature=1.0, seed=4), numbers)
        logits = torch.zeros(len(numbers), 50)
        first = chooser.draft(logits)
        chooser.judge(torch.zeros(len(numbers), 2, 50), first[:, None], torch.arange(50))
        chooser.select(torch.tensor(keep))
        return chooser.draft(torch.zeros(len(keep), 50)).tolist()

    assert draws([5, 6, 7], [0, 2]) == draws([5], [0]) + draws([7], [0])
