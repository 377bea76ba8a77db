"""Documents of several directories by weight: counts by epoch and over epochs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.data.mixture import epoch_documents

PARTS = st.lists(st.integers(0, 2), max_size=40).map(lambda parts: np.array(parts, np.int64))
WEIGHTS = st.lists(st.sampled_from([0.1, 0.25, 1 / 3, 0.5, 1, 1.5, 2, 3]), min_size=3, max_size=3)


def counts(part_of: np.ndarray, weights: list[float], seed: int, epoch: int) -> np.ndarray:
    chosen = epoch_documents(part_of, weights, seed, epoch)
    assert chosen.dtype == np.int64
    return np.bincount(chosen, minlength=len(part_of))


@given(part_of=PARTS, seed=st.integers(0, 3), epoch=st.integers(0, 5))
def test_weight_one_is_every_document_once(part_of: np.ndarray, seed: int, epoch: int) -> None:
    chosen = epoch_documents(part_of, [1.0, 1.0, 1.0], seed, epoch)
    assert chosen.tolist() == list(range(len(part_of)))


@settings(deadline=None)
@given(part_of=PARTS, weights=WEIGHTS, seed=st.integers(0, 3), epochs=st.integers(1, 12))
def test_over_epochs_all_documents_come_equally_often(
    part_of: np.ndarray, weights: list[float], seed: int, epochs: int
) -> None:
    total = np.zeros(len(part_of), np.int64)
    for epoch in range(epochs):
        once = counts(part_of, weights, seed, epoch)
        total += once
        for part, weight in enumerate(weights):
            inside = once[part_of == part]
            assert abs(inside.sum() - weight * len(inside)) < 1
            assert not len(inside) or inside.max() <= np.ceil(weight)
            seen = total[part_of == part]
            assert not len(seen) or seen.max() - seen.min() <= 1


@pytest.mark.parametrize(
    ("weight", "epochs", "times"),
    [
        pytest.param(0.5, 2, 1, id="halves"),
        pytest.param(0.1, 10, 1, id="tenths"),
        pytest.param(1 / 3, 3, 1, id="thirds"),
        pytest.param(1.5, 2, 3, id="one and a half"),
        pytest.param(2, 1, 2, id="twice"),
    ],
)
def test_a_round_of_epochs_is_complete(weight: float, epochs: int, times: int) -> None:
    part_of = np.zeros(30, np.int64)
    rounds = [counts(part_of, [weight], 0, epoch) for epoch in range(2 * epochs)]
    assert np.all(sum(rounds[:epochs]) == times)
    assert np.all(sum(rounds[epochs:]) == times)


def test_half_is_another_half_in_the_next_epoch() -> None:
    part_of = np.zeros(9, np.int64)
    first, second = (set(epoch_documents(part_of, [0.5], 0, epoch)) for epoch in range(2))
    assert (len(first), len(second)) == (4, 5)
    assert not first & second


def test_choice_depends_on_the_seed_and_a_part_on_itself_only() -> None:
    part_of = np.array([0] * 20 + [1] * 20)
    chosen = epoch_documents(part_of, [0.5, 0.5], 0, 0)
    assert not np.array_equal(chosen, epoch_documents(part_of, [0.5, 0.5], 1, 0))
    alone = epoch_documents(np.zeros(20, np.int64), [0.5], 0, 0)
    assert np.array_equal(chosen[chosen < 20], alone)
    assert not np.array_equal(chosen[chosen >= 20] - 20, alone)
