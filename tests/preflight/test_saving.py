"""What the preflight says of checkpoints by time."""

from __future__ import annotations

import dataclasses

import pytest

from eagle3.compose import compose_config
from eagle3.preflighting.forecast import judge_saving
from eagle3.preflighting.report import Report

KIMI = compose_config(["experiment=kimi_100k"])


def test_the_large_run_needs_a_fast_disk_for_its_interval() -> None:
    """14.29 GB in 24.5 s, which is 2 % of those and 20 min."""
    report = Report()
    judge_saving(report, KIMI)
    (found,) = report.findings
    assert report.facts["save_bytes_per_s"] == pytest.approx(14.291e9 / 24.49, rel=1e-3)
    assert report.facts["save_minutes_on_a_slow_disk"] == pytest.approx(49 * 71.457 / 60, rel=1e-3)
    assert "by time every 20 min on a disk that writes 583.56 MB" in found.reason
    assert "at 0.2 GB/s every 58.4 min" in found.reason


def test_nothing_is_said_where_no_clock_saves() -> None:
    trainer = dataclasses.replace(KIMI.trainer, checkpoint_every_minutes=None)
    report = Report()
    judge_saving(report, dataclasses.replace(KIMI, trainer=trainer))
    assert not report.findings
    assert not report.facts
