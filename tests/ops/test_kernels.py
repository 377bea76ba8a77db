"""Triton kernels: their numbers in the interpreter, what they compile to, who imports them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eagle3.ops import kernels

ROOT = Path(__file__).parents[2]
pytest.importorskip("triton", reason="Triton is for Linux")


def _python(*args: str, interpreted: bool = False) -> str:
    """Standard output of a Python process that succeeds."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, *args], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0")
CHECKS = ("tests/ops/row_kernel_checks.py", "tests/ops/own_column_kernel_checks.py")


@pytest.mark.parametrize("checks", CHECKS)
def test_kernels_equal_plain_pytorch_in_the_interpreter(checks: str) -> None:
    """In a process of its own: kernels are interpreted or compiled from their import on."""
    assert "passed" in _python(*PYTEST, checks, interpreted=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_equal_plain_pytorch_on_a_device() -> None:
    assert "passed" in _python(*PYTEST, *CHECKS)


def test_kernels_compile_for_every_card() -> None:
    out = _python("benchmarks/kernels.py", "--quick", "--compile-only", "--check")
    found = json.loads(out.splitlines()[-1])
    assert found["compiled"] == out.count("  fits\n") > 0
    assert found["largest_shared_bytes"] < 101_376
    assert found["largest_spill_bytes"] == 0


def test_where_kernels_are_available(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu, nowhere = torch.empty(0), torch.empty(0, device="meta")
    for value, expected in ((None, False), ("0", False), ("1", True)):
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        if value is not None:
            monkeypatch.setenv("TRITON_INTERPRET", value)
        assert kernels.available(on_cpu) is expected
        assert not kernels.available(nowhere)


def test_kernels_are_imported_where_they_run_only() -> None:
    program = "import sys, eagle3.objective; print('triton' in sys.modules)"
    assert _python("-c", program).split() == ["False"]
