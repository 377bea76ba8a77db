"""The cheap drafters, with figures worked out by hand."""

from __future__ import annotations

import pytest

from eagle3.data.tokens import TokenDocument
from eagle3.references import Ngram, PromptLookup, compare_references, judge

TRAINING = [
    TokenDocument([1, 2, 3, 4, 2, 3, 5], [False, True, True, True, True, True, True]),
    TokenDocument([9, 2, 3, 4], [False, True, True, True]),
]


def test_followers_back_off_to_shorter_contexts() -> None:
    """After 2 comes 3; after (2, 3) comes 4 twice and 5 once; 7 was never seen."""
    bigram, trigram = Ngram(TRAINING, 2), Ngram(TRAINING, 3)
    assert bigram.drafts([8, 2], 2, 1) == [3]
    assert trigram.drafts([8, 2, 3], 3, 1) == [4]
    assert trigram.drafts([8, 4, 3], 3, 1) == [4], "(4, 3) is unknown: what follows 3"
    assert trigram.drafts([8, 2, 7], 3, 1) == [2], "7 is unknown: the most frequent token"
    assert bigram.drafts([8, 2], 2, 3) == [3, 4, 2]


def test_prompt_lookup_copies_from_the_latest_match() -> None:
    lookup = PromptLookup()
    ids = [5, 6, 7, 8, 5, 6, 9, 5, 6]
    assert lookup.drafts(ids, 9, 2) == [9, 5]
    assert lookup.drafts(ids, 6, 3) == [7, 8, 5]
    assert lookup.drafts(ids, 4, 3) == []
    assert lookup.drafts([5], 1, 3) == []


def test_rounds_of_a_drafter_by_hand() -> None:
    """Answer tokens at places 2..7; rounds emit from place 3. The drafter always says 1, 1, 1.

    Place 3 holds 1, place 4 holds 1, place 5 holds 2: the round at row 1 accepts two and emits
    three (places 3, 4, 5); rows 4 and 5 (places 6, 7) hold 3 and 1: one round each.
    """

    class Ones:
        def drafts(self, ids: list[int], end: int, steps: int) -> list[int]:
            return [1] * steps

    document = TokenDocument([0, 0, 9, 1, 1, 2, 3, 1], [False, False] + [True] * 6)
    reference = judge("ones", Ones(), [document], 3)
    assert reference.accuracy == pytest.approx(3 / 5)
    assert reference.acceptance_replay == pytest.approx((3 + 1 + 1) / 3)


def test_all_three_on_repetitive_documents() -> None:
    loop = TokenDocument([1, 2, 3, 4] * 6, [False] * 4 + [True] * 20)
    found = {r.name: r for r in compare_references([loop], [loop], 3)}
    assert list(found) == ["bigram", "trigram", "prompt lookup"]
    assert found["bigram"].accuracy == 1.0
    assert found["trigram"].acceptance_replay == pytest.approx(19 / 5)
    assert found["prompt lookup"].accuracy == pytest.approx(18 / 19)
    assert compare_references([], [], 3)[0].accuracy == 0.0
