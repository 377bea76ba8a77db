"""The drafter with its cache, against one that is fed token by token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eagle3.config import ModelConfig
from eagle3.decoding.drafting import DraftSession
from eagle3.decoding.key_values import KeyValues, visible
from eagle3.model.layers import NormLayout
from eagle3.names import Arch
from tests.helpers import TINY, make_document, tiny_drafter
from tests.server import draft_as_server


@torch.no_grad()
@pytest.mark.parametrize(
    ("changes", "norms"),
    [
        ({}, NormLayout()),
        ({"arch": Arch.qwen3}, NormLayout()),
        ({"sliding_window": 4}, NormLayout()),
        ({"num_key_value_heads": 4}, NormLayout(norm_before_residual=True, norm_before_fc=True)),
        ({}, NormLayout(fc_norm=True, norm_output=True)),
    ],
    ids=["plain", "qwen3", "window", "speculators-like", "eagle3.1"],
)
def test_drafts_are_those_of_one_token_at_a_time(
    changes: dict[str, object], norms: NormLayout
) -> None:
    """Two documents side by side, rows in uneven lots, three true tokens drafted after each."""
    config: ModelConfig = replace(TINY, **changes)  # type: ignore[arg-type]
    drafter, steps = tiny_drafter(config, norms=norms), 3
    documents = [make_document(17, 1), make_document(14, 2)]
    wanted = [draft_as_server(drafter, document, steps) for document in documents]
    session, compared = DraftSession(drafter, 2, 30), 0
    at = [0, 0]
    for counts in ((4, 1), (1, 3), (3, 2), (2, 3)):
        longest = max(counts)
        tokens = torch.stack(
            [d.input_ids[a + 1 : a + 1 + longest] for d, a in zip(documents, at, strict=True)]
        )
        aux = torch.stack(
            [d.aux_hidden[a : a + longest] for d, a in zip(documents, at, strict=True)]
        )
        session.extend(tokens, aux, torch.tensor(counts))
        at = [a + count for a, count in zip(at, counts, strict=True)]
        for step in range(steps):
            logits = session.logits()
            for row in range(2):
                expected = wanted[row][at[row] - 1, step]
                torch.testing.assert_close(logits[row], expected, rtol=0, atol=1e-5)
                compared += 1
            following = [d.input_ids[a + 1 + step] for d, a in zip(documents, at, strict=True)]
            session.feed(torch.stack(following))
    assert compared == 24


@torch.no_grad()
def test_a_sequence_goes_on_alone() -> None:
    drafter, document = tiny_drafter(), make_document(12, 3)
    together, alone = DraftSession(drafter, 3, 20), DraftSession(drafter, 1, 20)
    tokens, aux = document.input_ids[None, 1:5], document.aux_hidden[None, :4]
    together.extend(tokens.repeat(3, 1), aux.repeat(3, 1, 1), torch.tensor([1, 4, 2]))
    alone.extend(tokens, aux, torch.tensor([4]))
    together.select(torch.tensor([1]))
    for session in (together, alone):
        session.extend(
            document.input_ids[None, 5:7], document.aux_hidden[None, 4:6], torch.tensor([2])
        )
    torch.testing.assert_close(together.logits(), alone.logits(), rtol=0, atol=1e-5)


def test_what_was_drafted_in_vain_is_overwritten() -> None:
    cache = KeyValues(8)
    first = torch.arange(6.0).view(1, 1, 6, 1)
    cache.put(first, first, torch.arange(6)[None], 6)
    again = torch.tensor([[[[10.0], [11.0]]]])
    keys, values = cache.put(again, again, torch.tensor([[3, 4]]), 5)
    assert keys.flatten().tolist() == values.flatten().tolist() == [0, 1, 2, 10, 11]


def test_a_token_sees_places_up_to_its_own() -> None:
    places = torch.tensor([[2, 3], [0, 1]])
    seen = visible(places, 4)[:, 0].int().tolist()
    assert seen == [[[1, 1, 1, 0], [1, 1, 1, 1]], [[1, 0, 0, 0], [1, 1, 0, 0]]]
    near = visible(places, 4, window=2)[:, 0].int().tolist()
    assert near == [[[0, 1, 1, 0], [0, 0, 1, 1]], [[1, 0, 0, 0], [1, 1, 0, 0]]]
