"""The stored reference cases, through the same checker that users run on other files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from eagle3.config import ComputeConfig
from tests.golden.check import COMPUTE, check_case

HERE = Path(__file__).parent
CASES = sorted(path for path in HERE.glob("s*.safetensors"))


@pytest.mark.parametrize("compute", COMPUTE.values(), ids=COMPUTE)
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_agrees_with_the_reference(path: Path, compute: ComputeConfig) -> None:
    missed = [c for c in check_case(path, compute) if not c.ok]
    assert not missed, missed


def test_checker_exits_1_on_a_miss_and_names_the_output(tmp_path: Path) -> None:
    case = HERE / "s04_ce.safetensors"
    tensors = load_file(case)
    tensors["clean.loss_1"] = tensors["clean.loss_1"] * (1 + 1e-4)
    save_file(tensors, tmp_path / case.name)
    (tmp_path / "s04_ce.json").write_text(case.with_suffix(".json").read_text())
    command = [sys.executable, str(HERE / "check.py")]
    good = subprocess.run([*command, str(case)], capture_output=True, text=True, check=False)
    assert good.returncode == 0, good.stdout + good.stderr
    bad = subprocess.run(
        [*command, str(tmp_path / case.name)], capture_output=True, text=True, check=False
    )
    assert bad.returncode == 1
    assert bad.stdout.count("! loss_1") == len(COMPUTE)
    assert bad.stdout.count("!") == len(COMPUTE)
