"""Acceptance metrics with numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.data.batch import PackedBatch
from eagle3.metrics import AcceptanceMetrics
from eagle3.model.ttt import step_rows
from eagle3.objective import StepResult, covered_rows
from eagle3.replay import answer_rows, replay
from tests.helpers import make_document, pack, tiny_head


def judged(
    batch: PackedBatch, right: Sequence[Sequence[int]], covered: Sequence[int] | None = None
) -> list[StepResult]:
    """Results in which row i of step s is right where ``right[s][i]``; overlap 1/2 everywhere."""
    out = []
    cover = torch.tensor(covered if covered is not None else [1] * len(batch)).bool()
    for step, hits in enumerate(right):
        rows = step_rows(batch, step)
        agree = torch.tensor(hits)[rows.starts]
        out.append(
            StepResult(
                rows=rows,
                losses=torch.full((len(agree),), 2.0 + step),
                draft_best=agree,
                verifier_best=torch.ones_like(agree),
                covered=cover[rows.targets],
                overlap=torch.full((len(agree),), 0.5),
            )
        )
    return out


def compute(batch: PackedBatch, results: list[StepResult]) -> dict[str, float]:
    metrics = AcceptanceMetrics(len(results))
    metrics.update(batch, results)
    return metrics.compute()


@pytest.mark.parametrize(
    "masks",
    [
        [[0, 1, 1, 1, 1, 1], [0, 0, 1, 1]],
        [[1, 1, 0, 1, 1, 0, 1]],
        [[0, 0, 1, 1], [0, 1, 1, 1, 0, 0, 1, 1, 1]],
        [[1, 1], [1, 1, 1]],
    ],
    ids=["answers", "holes", "short turns", "document ends"],
)
def test_a_perfect_drafter_scores_one_everywhere(masks: list[list[int]]) -> None:
    batch = pack([make_document(len(m), i, mask=m) for i, m in enumerate(masks)])
    values = compute(batch, judged(batch, [[1] * len(batch)] * 3))
    gates = batch.loss_mask
    for step in range(3):
        expected = 1.0 if bool(gates.any()) and values[f"full_acc/{step}"] else 0.0
        chains = _longest_run(batch) > step
        assert values[f"full_acc/{step}"] == (1.0 if chains else 0.0) == expected
        assert values[f"cond_acc/{step}"] == expected
    assert values["accuracy"] == 1.0
    assert values["coverage"] == 1.0


def _longest_run(batch: PackedBatch) -> int:
    best = run = 0
    previous = -1
    for gate, document in zip(batch.loss_mask.tolist(), batch.document_ids.tolist(), strict=True):
        run = run + 1 if gate and document == previous else int(gate)
        previous = document
        best = max(best, run)
    return best


def test_three_steps_by_hand() -> None:
    """One document of 6 rows, all gates on.

    right at step 0: 1 1 0 1 1 1      chains 6, 5, 4
    right at step 1: 1 0 1 1 1 -      prefix hits  5, 3, 2
    right at step 2: 1 1 1 1 - -      conditional on earlier hits: rows 0 1 3 4 | 0 3
    """
    batch = pack([make_document(7, 1, mask=[1] * 7)])
    values = compute(
        batch, judged(batch, [[1, 1, 0, 1, 1, 1], [1, 0, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]])
    )
    assert values["full_acc/0"] == values["accuracy"] == pytest.approx(5 / 6)
    assert values["full_acc/1"] == pytest.approx(3 / 5)
    assert values["full_acc/2"] == pytest.approx(2 / 4)
    assert values["cond_acc/0"] == pytest.approx(5 / 6)
    assert values["cond_acc/1"] == pytest.approx(3 / 4)
    assert values["cond_acc/2"] == pytest.approx(2 / 2)
    assert values["acceptance_pooled"] == pytest.approx(1 + 5 / 6 + 3 / 5 + 2 / 4)
    assert values["accept_rate/1"] == pytest.approx(0.5)
    assert values["loss"] == pytest.approx((2 + 3 + 4) / 3)
    # Rows 0..4 emit x2..x6. Row 0 accepts 3 and emits 4; row 4 accepts 2 but only x6 is left.
    assert values["acceptance_replay"] == pytest.approx((4 + 1) / 2)
    # The draft for x6 counts, that for a token behind it does not.
    assert [values[f"round_acc/{step}"] for step in range(3)] == [1.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("walkable", "accepted", "expected"),
    [
        ([1, 1, 1, 1, 1], [2, 0, 0, 3, 0], (5, 2)),
        ([0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0], (3, 3)),
        ([0, 1, 1, 1, 0, 1, 1], [0, 1, 0, 3, 0, 1, 0], (5, 3)),
        ([0, 0], [0, 0], (0, 0)),
        ([], [], (0, 0)),
    ],
    ids=["drawn in the docstring", "all misses", "two answers", "no answer", "empty"],
)
def test_rounds_by_hand(
    walkable: list[int], accepted: list[int], expected: tuple[int, int]
) -> None:
    assert replay(np.array(walkable, dtype=bool), np.array(accepted)) == expected


def test_uncovered_rows_count_as_wrong_and_are_reported() -> None:
    """4 rows, 1 uncovered, 3 right: accuracy .75, coverage .75, and 1.0 among covered rows."""
    batch = pack([make_document(5, 2, mask=[1] * 5)])
    values = compute(batch, judged(batch, [[1, 1, 1, 1]], covered=[1, 0, 1, 1]))
    assert values["accuracy"] == pytest.approx(0.75)
    assert values["coverage"] == pytest.approx(0.75)
    assert values["accuracy"] / values["coverage"] == pytest.approx(1.0)
    assert values["accept_rate/0"] == pytest.approx(0.375)


def test_coverage_by_next_token_and_by_the_full_head() -> None:
    """The next token decides, except where it is missing or opens the next prompt."""
    document = make_document(6, 3, mask=[0, 1, 1, 0, 1, 1])
    batch = pack([replace(document, input_ids=torch.tensor([0, 1, 2, 3, 4, 5]))])
    t2d = torch.ones(50, dtype=torch.bool)
    t2d[[2, 3]] = False
    gated = batch.loss_mask.nonzero()[:, 0]
    assert gated.tolist() == [0, 1, 3, 4]
    head = tiny_head()
    # Row 0 is followed by token 2, outside; row 1 by token 3, which opens a prompt; row 4 by none.
    assert covered_rows(batch, gated, t2d, head).tolist() == [False, True, True, True]
    full = torch.randn(50, 32, generator=torch.Generator().manual_seed(4))
    head.full_weight = full
    best = (head.features(batch.last_hidden[gated]) @ full.T).argmax(-1)
    assert torch.equal(covered_rows(batch, gated, t2d, head), t2d[best])


def test_packs_and_pools_add_up_by_counts() -> None:
    """Two packs with unequal counts give the pooled value, not the mean of means."""
    small = pack([make_document(2, 5, mask=[1, 1])])
    large = pack([make_document(10, 6, mask=[1] * 10)])
    metrics = AcceptanceMetrics(1)
    metrics.update(small, judged(small, [[1]]))
    metrics.update(large, judged(large, [[0] * 9]))
    assert metrics.compute()["accuracy"] == pytest.approx(0.1)


def test_accuracy_by_length_goes_by_the_whole_document() -> None:
    short, long = make_document(5, 7, mask=[1] * 5), make_document(6, 8, mask=[1] * 6)
    batch = replace(pack([short, long]), document_lengths=(5, 3000))
    values = compute(batch, judged(batch, [[1, 1, 0, 0, 1, 1, 1, 1, 0]]))
    assert values["accuracy_by_length/0-1k"] == pytest.approx(0.5)
    assert values["accuracy_by_length/2-4k"] == pytest.approx(0.8)
    assert "accuracy_by_length/1-2k" not in values


def test_rows_that_emit_an_answer_token() -> None:
    """Tokens 2..4 and 7, 8 are answers: the first of each comes from the prefill."""
    mask = np.array([0, 0, 1, 1, 1, 0, 0, 1, 1], dtype=bool)
    assert answer_rows(mask).tolist() == [0, 1, 1, 0, 0, 0, 1, 0]
    assert answer_rows(np.array([True])).tolist() == []


def with_sources(batch: PackedBatch, *labels: str) -> PackedBatch:
    return replace(batch, document_sources=labels)


def test_sources_by_hand() -> None:
    """Two documents of code and one of chat, each walked on its own.

    Accepted drafts per row (2 steps), rows that emit in brackets:
    code 0 1 1 1 1 1: [0 2 0 0] 0 -> rounds at rows 0 and 1: 1 + 3 tokens in 2 rounds
    chat 1 1 1 1:     [2 0] 0     -> one round of 2 tokens (a third would be past the answer)
    code 1 1 1:       [0] 0       -> one round of 1 token
    """
    masks = [[0, 1, 1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1]]
    documents = [make_document(len(m), i, mask=m) for i, m in enumerate(masks)]
    batch = with_sources(pack(documents), "code", "chat", "code")
    right = [[0, 1, 0, 0, 0, 1, 0, 0, 0, 0], [0, 1, 0, 0, 0, 1, 0, 0, 0, 0]]
    metrics = AcceptanceMetrics(2, ["chat", "code", "math"])
    metrics.update(batch, judged(batch, right))
    values = metrics.compute()
    assert values["acceptance_by_source/chat"] == pytest.approx(2 / 1)
    assert values["acceptance_by_source/code"] == pytest.approx((4 + 1) / (2 + 1))
    assert values["acceptance_replay"] == pytest.approx((4 + 2 + 1) / (2 + 1 + 1))
    assert values["accuracy_by_source/chat"] == pytest.approx(1 / 3)
    assert values["accuracy_by_source/code"] == pytest.approx(1 / 7)
    assert not any("math" in name for name in values), "nothing of it was judged"


@pytest.mark.parametrize("sources", [(), ("chat",)], ids=["none", "one"])
def test_a_single_source_is_not_told_apart(sources: Sequence[str]) -> None:
    batch = with_sources(pack([make_document(5, 1, mask=[1] * 5)]), "chat")
    metrics = AcceptanceMetrics(1, sources)
    metrics.update(batch, judged(batch, [[1] * 4]))
    assert not any("by_source" in name for name in metrics.compute())


@pytest.mark.parametrize("labels", [("chat", "new"), ()], ids=["unknown", "unlabelled"])
def test_documents_of_other_labels_are_in_the_totals_only(labels: tuple[str, ...]) -> None:
    batch = with_sources(pack([make_document(4, i, mask=[1] * 4) for i in range(2)]), *labels)
    metrics = AcceptanceMetrics(1, ["chat", "code"])
    metrics.update(batch, judged(batch, [[1, 1, 1, 0, 0, 0]]))
    values = metrics.compute()
    assert values["accuracy"] == pytest.approx(0.5)
    found = {name: value for name, value in values.items() if "by_source" in name}
    expected = {"accuracy_by_source/chat": 1.0, "acceptance_by_source/chat": 2.0} if labels else {}
    assert found == expected


@settings(max_examples=30)
@given(data=st.data())
def test_sources_add_up_to_the_total(data: st.DataObject) -> None:
    """Whatever the packs, rounds and tokens of the sources sum to those of all documents."""
    metrics = AcceptanceMetrics(2, ["a", "b", "c"])
    for _ in range(data.draw(st.integers(1, 3))):
        masks = data.draw(st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=9), max_size=4))
        if not masks:
            continue
        labels = [data.draw(st.sampled_from(["a", "b", "c", "d"])) for _ in masks]
        documents = [make_document(len(m), i, mask=m) for i, m in enumerate(masks)]
        batch = with_sources(pack(documents), *labels)
        hits = st.lists(st.integers(0, 1), min_size=len(batch), max_size=len(batch))
        metrics.update(batch, judged(batch, [data.draw(hits), data.draw(hits)]))
    totals = [metrics.chains[:1], metrics.top1, metrics.emitted, metrics.rounds]
    assert torch.equal(metrics.by_source.sum(0), torch.cat(totals))


def test_sources_of_ranks_add_up() -> None:
    """States have one shape on all ranks, so their sums are those of one rank with all packs."""
    batches = [
        with_sources(pack([make_document(6, i, mask=[1] * 6)]), label)
        for i, label in enumerate(["b", "a"])
    ]
    together, *ranks = (AcceptanceMetrics(1, ["a", "b"]) for _ in range(3))
    for rank, batch in zip(ranks, batches, strict=True):
        results = judged(batch, [[1, 0, 1, 1, 0]])
        rank.update(batch, results)
        together.update(batch, results)
    ranks[0].by_source += ranks[1].by_source
    assert torch.equal(ranks[0].by_source, together.by_source)


def test_no_round_is_no_acceptance_length() -> None:
    """One supervised token an answer: it comes from the prefill, and nothing is drafted after."""
    batch = pack([make_document(6, 1, mask=[0, 0, 1, 0, 0, 1])])
    values = compute(batch, judged(batch, [[1] * len(batch)] * 2))
    assert math.isnan(values["acceptance_replay"])
    assert values["accuracy"] == 1.0
