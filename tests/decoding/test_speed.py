"""The speed model by hand, and the costs that it is fed with."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3.decoding.costs import Costs, measure_costs, typical
from eagle3.decoding.huggingface import HuggingFaceDecoding
from eagle3.decoding.speed import best, lengths_of, speed_table
from eagle3.errors import ConfigError
from eagle3.evaluation.config import SpeedConfig
from eagle3.evaluation.report import Report
from eagle3.evaluation.speed_report import add_prediction
from tests.decoding.tiny import LAYERS, make_drafter, make_prompts, make_verifier

COSTS = Costs(verifier_s=(0.010, 0.011, 0.012, 0.020), first_draft_s=0.002, next_draft_s=0.001)


def test_a_table_by_hand() -> None:
    rows = speed_table(lengths_of([0.6, 0.3, 0.1]), COSTS, batch_size=2)
    assert [row.acceptance_length for row in rows] == pytest.approx([1.6, 1.9, 2.0])
    assert [row.round_s for row in rows] == pytest.approx([0.013, 0.015, 0.024])
    assert [row.speedup for row in rows] == pytest.approx([1.6 / 1.3, 1.9 / 1.5, 2.0 / 2.4])
    per_second = [3.2 / 0.013, 3.8 / 0.015, 4 / 0.024]
    assert [row.tokens_per_s for row in rows] == pytest.approx(per_second)
    assert [row.break_even for row in rows] == pytest.approx([1.3, 1.5, 2.4])
    assert best(rows).draft_tokens == 2


def test_the_rate_that_breaks_even_solves_its_equation() -> None:
    for row in speed_table([1.5, 2.0, 2.5], COSTS):
        assert row.break_even_rate is not None
        reached = sum(row.break_even_rate**power for power in range(row.draft_tokens + 1))
        assert reached == pytest.approx(row.break_even)
    (row,) = speed_table([2.0], Costs((1.0, 2.5), 0.1, 0.1))
    assert row.break_even_rate is None, "two tokens a round do not pay for 2.6 passes"


def test_more_acceptance_than_costs_are_known_for_is_left_out() -> None:
    assert len(speed_table([1.1] * 9, COSTS)) == 3


@pytest.mark.parametrize("accepted", [[0.3, 0.5], [1.2], [-0.1]])
def test_shares_that_cannot_be_are_refused(accepted: list[float]) -> None:
    with pytest.raises(ConfigError, match="acceptance by position"):
        lengths_of(accepted)


@pytest.mark.parametrize(
    ("speed", "said"),
    [
        (SpeedConfig(baseline_tok_s=0.0, acceptance=[0.5]), "expected tokens per second above 0"),
        (SpeedConfig(baseline_tok_s=90.0), "no acceptance is known"),
        (SpeedConfig(90.0, [0.5], [2.0, 2.0]), "found 2.0 for one token"),
        (SpeedConfig(90.0, [0.5], [1.0]), "that of two or more"),
        (SpeedConfig(90.0, [0.5], drafter_ms=-1.0), "milliseconds of 0 or more"),
    ],
)
def test_a_prediction_that_cannot_be_made_is_refused(speed: SpeedConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        add_prediction(Report("test"), speed)


def test_nothing_is_predicted_unasked() -> None:
    report = Report("test", lengths=[1.5])
    add_prediction(report, SpeedConfig())
    assert not report.tables


def test_costs_of_real_passes(tmp_path: Path) -> None:
    decoding = HuggingFaceDecoding(make_verifier(tmp_path), LAYERS)
    found = measure_costs(decoding, make_drafter(), make_prompts([9, 12]), 3, repeats=3)
    assert len(found) == 3
    middle = typical(found)
    assert len(middle.verifier_s) == 4
    assert middle.most_draft_tokens == 3
    assert middle.first_draft_s == sorted(each.first_draft_s for each in found)[1]
    assert middle.round_s(3) > middle.verifier_s[3] > 0
    assert middle.round_s(0) == middle.verifier_s[0]


def test_costs_of_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected at least one of the verifier"):
        Costs((), 0.1, 0.1)
