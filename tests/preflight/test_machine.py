"""Cards that are missing, held by others, or only named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from eagle3.config import Config, TrainerConfig
from eagle3.inspection.facts import Severity
from eagle3.names import Accelerator, CardName
from eagle3.preflighting.machine import CARDS, judge_cards, planned_device
from eagle3.preflighting.report import Report


def config_on(devices: object, accelerator: Accelerator = Accelerator.gpu) -> Config:
    return Config(trainer=TrainerConfig(accelerator=accelerator, devices=devices))


def judged(config: Config, present: int) -> Report:
    report = Report()
    judge_cards(report, config, present)
    return report


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of that name that knows four cards, of which 0 and 1 are in use."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = topo ]; then echo "GPU0 X NV4"; exit; fi\n'
        'printf "0, 40000\\n1, 81000\\n2, 3\\n3, 500\\n"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(("devices", "present"), [(4, 2), ([0, 5], 4)], ids=str)
def test_more_cards_than_the_machine_has_stop(devices: object, present: int) -> None:
    (found,) = judged(config_on(devices), present).findings
    assert found.severity is Severity.stop
    assert f"this machine has {present}" in found.reason
    assert "set trainer.devices=2 " in found.action


def test_a_machine_without_cards_warns_unless_the_run_is_on_cpu() -> None:
    (warned,) = judged(config_on(4), 0).findings
    assert warned.severity is Severity.warning
    (fine,) = judged(config_on(4, Accelerator.cpu), 0).findings
    assert fine.severity is Severity.ok
    (auto,) = judged(config_on(1, Accelerator.auto), 0).findings
    assert auto.severity is Severity.ok


@pytest.mark.usefixtures("nvidia_smi")
def test_cards_that_others_hold_warn_and_free_ones_are_named() -> None:
    report = judged(config_on(2), 4)
    busy = report.findings[-1]
    assert busy.severity is Severity.warning
    assert busy.action == "set 'trainer.devices=[2,3]'"
    assert report.facts["topology"] == "GPU0 X NV4\n"
    assert judged(config_on([2, 3]), 4).findings[-1].severity is Severity.ok
    assert judged(config_on(3), 4).findings[-1].action == "wait for them"


@pytest.mark.usefixtures("nvidia_smi")
def test_cards_are_counted_as_torch_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert judged(config_on(2), 2).findings[-1].severity is Severity.ok
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert "memory of 1 (" in judged(config_on(2), 2).findings[-1].reason


def test_without_the_program_nothing_is_said_of_other_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    report = judged(config_on(2), 4)
    assert [one.topic for one in report.unchecked] == ["busy cards"]
    environment = report.facts["environment"]
    assert isinstance(environment, dict)
    assert environment["NCCL_P2P_DISABLE"] == "1"


def test_a_named_card_stands_for_the_one_that_is_not_here() -> None:
    for name in CardName:
        assert planned_device(replace(config_on(1), card=name), 0) == CARDS[name]
    assert planned_device(config_on(1), 0) is None


def test_ranks_on_cpu_share_the_memory_of_the_host() -> None:
    one, two = (planned_device(config_on(n, Accelerator.cpu), 0) for n in (1, 2))
    assert one is not None
    assert two is not None
    assert two.num_bytes == pytest.approx(one.num_bytes / 2, rel=0.1)
