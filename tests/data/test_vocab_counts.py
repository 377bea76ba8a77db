"""Counting supervised tokens."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle3.data import vocab_counts
from eagle3.data.layout import StateLayout
from eagle3.data.vocab_counts import token_frequencies
from eagle3.errors import DataError

VOCAB = 12


@dataclass(frozen=True)
class Given:
    """Documents in memory: pairs of token and gate."""

    documents: list[list[tuple[int, bool]]]

    @property
    def layout(self) -> StateLayout:
        return StateLayout(3, 4, VOCAB)

    def input_ids(self, document: int) -> Tensor:
        return torch.tensor([token for token, _ in self.documents[document]], dtype=torch.int64)

    def loss_mask(self, document: int) -> Tensor:
        return torch.tensor([gate for _, gate in self.documents[document]], dtype=torch.bool)


token = st.tuples(st.integers(0, VOCAB - 1), st.booleans())


@settings(max_examples=30, deadline=None)
@given(documents=st.lists(st.lists(token, max_size=9), max_size=150), workers=st.integers(1, 3))
def test_supervised_tokens_are_counted_whatever_the_threads(
    documents: list[list[tuple[int, bool]]], workers: int
) -> None:
    chosen = range(0, len(documents), 2)
    counts = token_frequencies(Given(documents), chosen, workers)
    expected = [
        sum(found == (wanted, True) for d in chosen for found in documents[d])
        for wanted in range(VOCAB)
    ]
    assert counts.dtype == torch.int64
    assert counts.tolist() == expected


def test_an_array_of_documents_may_name_one_twice() -> None:
    counts = token_frequencies(Given([[(3, True)], [(4, True)]]), np.array([1, 1, 0]), 1)
    assert counts[[3, 4]].tolist() == [1, 2]


def test_a_file_that_cannot_be_read_stops_the_count() -> None:
    class Broken(Given):
        def input_ids(self, document: int) -> Tensor:
            if document == 70:
                raise DataError("/data/data_70.pt: cannot be read")
            return super().input_ids(document)

    with pytest.raises(DataError, match="data_70"):
        token_frequencies(Broken([[(1, True)]] * 100), range(100), 2)


def test_progress_says_how_much_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vocab_counts, "_PROGRESS_S", 0.0)
    with caplog.at_level(logging.INFO):
        token_frequencies(Given([[(1, True)]] * 100), range(100), 1)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("counting response tokens: 64 of 100 documents (64 %), 0:00 left")
