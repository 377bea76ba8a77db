"""Draft vocabulary: which tokens are selected."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from eagle3.data.vocab import VocabMap
from eagle3.errors import ConfigError

GOLDEN = Path(__file__).parents[1] / "golden" / "vocab_mapping"
CASES = json.loads(GOLDEN.with_suffix(".json").read_text())["cases"]


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("form", ["mapping", "tensor"])
def test_selection_equals_the_golden(name: str, form: str) -> None:
    stored, case = load_file(GOLDEN.with_suffix(".safetensors")), CASES[name]
    tokens, counts = stored[f"{name}.tokens"].tolist(), stored[f"{name}.counts"].tolist()
    draft, verifier = case["draft_vocab_size"], case["target_vocab_size"]
    frequencies: dict[int, int] | torch.Tensor = dict(zip(tokens, counts, strict=True))
    if form == "tensor":
        frequencies = torch.zeros(verifier, dtype=torch.int64)
        frequencies[tokens] = torch.tensor(counts, dtype=torch.int64)
    vocab_map = VocabMap.from_frequencies(frequencies, draft, verifier)
    assert torch.equal(vocab_map.d2t, stored[f"{name}.d2t"])
    assert torch.equal(vocab_map.t2d, stored[f"{name}.t2d"])
    assert vocab_map.selected.tolist() == case["selected"]


@given(ids=st.sets(st.integers(0, 79), min_size=1))
def test_round_trip_between_vocabularies(ids: set[int]) -> None:
    vocab_map = VocabMap.from_selected(ids, 80)
    draft_ids = torch.arange(len(ids))
    assert vocab_map.to_verifier(draft_ids).tolist() == sorted(ids)
    assert torch.equal(vocab_map.selected, vocab_map.to_verifier(draft_ids))
    assert vocab_map.covers(torch.arange(80)).nonzero().flatten().tolist() == sorted(ids)
    assert (vocab_map.draft_size, vocab_map.verifier_size) == (len(ids), 80)


def test_no_token_is_not_covered() -> None:
    vocab_map = VocabMap.from_selected([1, 3], 4)
    found = vocab_map.covers(torch.tensor([[-1, 3], [1, 0]]))
    assert found.tolist() == [[False, True], [True, False]]


def test_rare_token_is_kept_on_request() -> None:
    counts = {token: 100 - token for token in range(90)}
    assert 95 not in VocabMap.from_frequencies(counts, 10, 100).selected
    kept = VocabMap.from_frequencies(counts, 10, 100, always_keep=(95, 3))
    assert kept.selected.tolist() == [*range(9), 95]


def test_few_tokens_are_filled_up() -> None:
    selected = VocabMap.from_frequencies(dict.fromkeys(range(40, 50), 1), 16, 100).selected
    assert selected.tolist() == [*range(6), *range(40, 50)]


@pytest.mark.parametrize("draft_size", [20, 30])
def test_full_vocabulary_is_the_identity(draft_size: int) -> None:
    vocab_map = VocabMap.from_frequencies({3: 1}, draft_size, 20)
    assert torch.equal(vocab_map.selected, torch.arange(20))
    assert vocab_map.t2d.all()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        pytest.param(lambda: VocabMap.from_selected([3, 3], 9), "repeated", id="repeated"),
        pytest.param(lambda: VocabMap.from_selected([3, 9], 9), r"3\.\.9", id="above"),
        pytest.param(lambda: VocabMap.from_frequencies({-1: 2}, 4, 9), r"-1\.\.-1", id="below"),
        pytest.param(
            lambda: VocabMap.from_frequencies(torch.ones(8), 4, 9), r"\[8\]", id="counts shape"
        ),
        pytest.param(
            lambda: VocabMap.from_frequencies({}, 2, 9, always_keep=(1, 2, 3)), "3 ids", id="keep"
        ),
    ],
)
def test_impossible_selection(build: Callable[[], VocabMap], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


def test_an_end_of_turn_seen_once_is_kept() -> None:
    """Frequent tokens fill the vocabulary; the end of a turn came once, or never."""
    counts = torch.full((100,), 50)
    counts[98], counts[99] = 1, 0
    assert VocabMap.from_frequencies(counts, 10, 100).selected.tolist() == list(range(10))
    kept = VocabMap.from_frequencies(counts, 10, 100, always_keep=[99, 98])
    assert kept.selected.tolist() == [*range(8), 98, 99]


@given(
    counts=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    data=st.data(),
)
def test_selection_is_the_best_there_is(counts: list[int], data: st.DataObject) -> None:
    """Of all maps with these tokens kept none covers more, and equal counts go to lower ids."""
    verifier = len(counts)
    draft = data.draw(st.integers(1, verifier))
    keep = data.draw(st.sets(st.integers(0, verifier - 1), max_size=draft))
    selected = VocabMap.from_frequencies(torch.tensor(counts), draft, verifier, keep).selected
    chosen = set(selected.tolist())
    assert len(chosen) == draft
    assert keep <= chosen
    others = [(-counts[token], token) for token in range(verifier) if token not in chosen]
    free = [(-counts[token], token) for token in chosen - keep]
    assert not free or not others or max(free) < min(others)
