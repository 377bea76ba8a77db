"""Summary, verdict and curves from rows of metrics and a few facts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from eagle3.curves import _labels, draw_curves, start_reference
from eagle3.loggers import CsvLogger
from eagle3.report import Facts, summarize, verdict, write_report
from eagle3.run_folder import X_AXIS, read_json

REFERENCES = {
    "bigram": {"accuracy": 0.205, "acceptance": 1.22},
    "prompt lookup": {"accuracy": 0.322, "acceptance": 1.41},
}
FACTS = Facts(
    name="tiny_ab12",
    exit_reason="finished",
    tokens_per_step=1024,
    total_steps=30,
    draft_steps=3,
    accelerator="cpu",
    device_hours=0.2,
    data_fingerprint="f00d",
    vocab_coverage=0.987,
    git_revision="0123456789abcdef",
    git_dirty=False,
    best_checkpoint="checkpoints/best.ckpt",
    references=REFERENCES,
)


def rows(
    acceptance: Sequence[float], losses: Sequence[float], accuracy: float = 0.3
) -> list[dict[str, float]]:
    """A training row every five steps and a validation every ten."""
    train = [{X_AXIS: 5.0 * i, "train/loss": 3.0 / i, "train/accuracy": 0.1} for i in range(1, 7)]
    judged = [
        {
            X_AXIS: 10.0 * (i + 1),
            "val/acceptance_replay": length,
            "val/acceptance_pooled": length + 0.1,
            "val/accuracy": accuracy,
            "val/full_acc/0": accuracy,
            "val/full_acc/1": accuracy / 2,
            "val/loss": loss,
        }
        for i, (length, loss) in enumerate(zip(acceptance, losses, strict=True))
    ]
    return sorted(train + judged, key=lambda row: row[X_AXIS])


def test_best_is_the_best_validation_not_the_last() -> None:
    summary = summarize(rows([3.2, 3.4, 3.3], [3.0, 2.0, 2.0]), FACTS)
    assert summary["best/acceptance_replay"] == 3.4
    assert summary["best/step"] == 20
    assert summary["best/accuracy"] == 0.3
    assert summary["steps"] == 30
    assert summary["cpu_hours"] == 0.2


def test_the_first_of_equal_validations_is_the_best() -> None:
    assert summarize(rows([3.4, 3.4], [2.0, 2.0]), FACTS)["best/step"] == 10


def test_a_run_without_validation_has_no_best() -> None:
    summary = summarize(rows([], []), FACTS)
    assert summary["best/acceptance_replay"] is None
    lines = verdict(summary)
    assert len(lines) == 5
    assert "not measured" in lines[0]
    assert "data.val_ratio" in lines[4]


@pytest.mark.parametrize(
    ("acceptance", "losses", "trend", "advice"),
    [
        ([1.2, 1.3], [3.0, 2.0], "still improving", "train longer"),
        ([1.4, 1.3], [2.0, 2.5], "overfitting", "more prompts"),
        ([1.4, 1.3], [2.5, 2.5], "worse than the one before", "lower lr"),
        ([1.4, 1.4], [2.5, 2.4], "levelled off", "capture more answers"),
        ([1.4], [2.5], "too few validations", "capture more answers"),
    ],
    ids=["improving", "overfitting", "worse", "flat", "one validation"],
)
def test_the_verdict_reads_the_trend(
    acceptance: list[float], losses: list[float], trend: str, advice: str
) -> None:
    lines = verdict(summarize(rows(acceptance, losses), FACTS))
    assert len(lines) == 5
    assert trend in lines[2]
    assert advice in lines[4]


@pytest.mark.parametrize(
    ("length", "judgement"),
    [
        (1.5, "beats all of them"),
        (1.3, "beats only bigram"),
        (1.22, "beats none of them"),
        (1.1, "beats none of them"),
    ],
)
def test_the_drafter_is_held_against_the_references(length: float, judgement: str) -> None:
    """By acceptance length; a tie is no victory."""
    line = verdict(summarize(rows([length], [2.0]), FACTS))[1]
    assert "bigram 1.22 (20.5%)" in line
    assert judgement in line


@pytest.mark.parametrize(
    ("changed", "advice"),
    [
        ({"bad_samples": ("data_3.pt: truncated",)}, "bad samples"),
        ({"vocab_coverage": 0.8}, "draft_vocab_size"),
        ({"skipped_steps": 2}, "lower lr"),
    ],
    ids=["bad samples", "coverage", "skipped steps"],
)
def test_faults_of_the_data_come_first(changed: dict[str, Any], advice: str) -> None:
    summary = summarize(rows([1.2, 1.3], [3.0, 2.0]), dataclasses.replace(FACTS, **changed))
    assert advice in verdict(summary)[4]


def test_the_report_is_written_from_the_metrics_file(tmp_path: Path) -> None:
    logger = CsvLogger(tmp_path / "metrics.csv")
    for row in rows([1.2, 1.3], [3.0, 2.0]):
        logger.log_metrics({k: v for k, v in row.items() if k != X_AXIS}, step=int(row[X_AXIS]))
    summary = write_report(tmp_path, FACTS)
    assert summary["best/acceptance_replay"] == 1.3
    assert json.loads(json.dumps(summary)) == read_json(tmp_path, "summary.json")
    required = {
        "best/acceptance_replay",
        "best/step",
        "best/accuracy",
        "best/ckpt",
        "tokens_per_step",
        "data/fingerprint",
        "vocab/coverage",
        "git/revision",
        "git/dirty",
        "exit_reason",
        "data/bad_samples",
        "references",
    }
    assert required <= summary.keys()
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def picture(path: Path) -> np.ndarray:
    image: np.ndarray = matplotlib.image.imread(path)
    return image


def test_references_and_validation_are_drawn(tmp_path: Path) -> None:
    drawn = rows([1.2, 1.3], [3.0, 2.0])
    draw_curves(drawn, tmp_path / "a.png", title="t", references={})
    draw_curves(drawn, tmp_path / "b.png", title="t", references=REFERENCES)
    draw_curves([], tmp_path / "c.png", title="t", references={})
    a, b, c = (picture(tmp_path / name) for name in ("a.png", "b.png", "c.png"))
    assert a.shape == b.shape == c.shape
    assert (a != b).any()
    assert (a != c).any()


def test_labels_of_close_references_share_a_line() -> None:
    close = {"trigram": 1.031, "bigram": 1.03, "prompt lookup": 1.4}
    assert _labels(close) == [("bigram, trigram", 1.031), ("prompt lookup", 1.4)]


def test_the_start_is_a_reference_where_it_was_scored(tmp_path: Path) -> None:
    """Only a drafter that was trained before is scored at step 0."""
    later = rows([1.2, 1.3], [3.0, 2.0])
    judged = next(row for row in later if "val/loss" in row)
    scored = {**judged, X_AXIS: 0.0, "val/acceptance_replay": 1.15, "val/loss": 2.5}
    begun = [scored, *later]
    assert start_reference(later) == {}
    expected = {"loss": 2.5, "accuracy": 0.3, "acceptance": 1.15}
    assert start_reference(begun) == {"start": expected}
    assert start_reference([scored | {"val/acceptance_replay": float("nan")}]) == {}
    summary = summarize(begun, FACTS)
    assert summary["start/acceptance_replay"] == 1.15
    assert list(summary["references"]) == ["start", *REFERENCES]
    assert "start 1.15 (30.0%)" in verdict(summary)[1]
    assert summarize(later, FACTS)["start/acceptance_replay"] is None
    draw_curves(begun, tmp_path / "a.png", title="t", references={})
    given = {"start": expected}
    draw_curves(begun, tmp_path / "b.png", title="t", references=given)
    draw_curves(later, tmp_path / "c.png", title="t", references={})
    a, b, c = (picture(tmp_path / name) for name in ("a.png", "b.png", "c.png"))
    assert (a == b).all(), "drawn once, also where the summary names it"
    assert (a != c).any()
