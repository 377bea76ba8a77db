"""Supervised runs and the choice of trained turns."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3.data.masks import Runs, apply_train_on, supervised_runs
from eagle3.names import TrainOn

MASKS = st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        pytest.param([0, 0, 1, 1, 0, 1], [[2, 4], [5, 6]], id="two turns"),
        pytest.param([1, 1, 1], [[0, 3]], id="all"),
        pytest.param([0, 0], [], id="none"),
    ],
)
def test_runs_of_a_mask(mask: list[int], expected: list[list[int]]) -> None:
    assert supervised_runs(np.array(mask, dtype=bool)).tolist() == expected


@pytest.mark.parametrize(
    ("train_on", "expected"),
    [
        pytest.param(TrainOn.assistant, [0, 1, 1, 0, 1, 0], id="assistant"),
        pytest.param(TrainOn.last_turn, [0, 0, 0, 0, 1, 0], id="last_turn"),
        pytest.param(TrainOn.all, [1, 1, 1, 1, 1, 1], id="all"),
    ],
)
def test_trained_turns(train_on: TrainOn, expected: list[int]) -> None:
    mask = torch.tensor([0, 1, 1, 0, 1, 0], dtype=torch.bool)
    assert apply_train_on(mask, train_on).int().tolist() == expected


def test_last_turn_of_an_unsupervised_document_is_empty() -> None:
    mask = torch.zeros(4, dtype=torch.bool)
    assert not apply_train_on(mask, TrainOn.last_turn).any()


@given(masks=MASKS, train_on=st.sampled_from(TrainOn))
def test_runs_of_many_documents_follow_their_masks(
    masks: list[list[bool]], train_on: TrainOn
) -> None:
    lengths = np.array([len(mask) for mask in masks])
    runs = Runs.stack(supervised_runs(np.array(mask)) for mask in masks)
    trained = [apply_train_on(torch.tensor(mask), train_on) for mask in masks]
    chosen = runs.train_on(train_on, lengths)
    gates = chosen.gated_rows()
    assert chosen.totals().tolist() == [int(mask.sum()) for mask in trained]
    assert gates.totals().tolist() == [int(mask[1:].sum()) for mask in trained]
    asked = [(d, start) for d, mask in enumerate(trained) for start in range(len(mask))]
    documents, starts = np.array(asked).T
    expected = [int(trained[d][1:][start : start + 3].sum()) for d, start in asked]
    assert gates.count(documents, starts, starts + 3).tolist() == expected
