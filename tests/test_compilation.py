"""``compute.compile=layer``: one set of graphs for all packings, the same curves and names."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.compiled_packings import CASES, PACKINGS
from tests.tiny_run import TinyWorld, clean_environment, curve, make_world, some_documents

ROOT = Path(__file__).parents[1]
RUN = ("max_seq_len=32", "epochs=1", "data.val_ratio=0.2", "trainer.max_steps=6")
NEEDS_COMPILER = pytest.mark.skipif(
    shutil.which("g++") is None, reason="no C++ compiler (g++) for torch.compile"
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    return make_world(tmp_path_factory.mktemp("world"), some_documents(16))


@pytest.fixture(scope="module")
def packings() -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.compiled_packings"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=clean_environment(),
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@NEEDS_COMPILER
@pytest.mark.parametrize("case", CASES)
def test_random_packings_compile_nothing_after_the_first_steps(
    packings: dict[str, dict[str, Any]], case: str
) -> None:
    graphs = packings[case]["graphs"]
    assert len(graphs) == PACKINGS
    assert graphs[0] > 0
    assert set(graphs[1:]) == {graphs[1]}
    assert packings[case]["graphs_after_validation"] == graphs[1]


@NEEDS_COMPILER
@pytest.mark.parametrize("case", CASES)
def test_compiled_training_follows_the_plain_curve(
    packings: dict[str, dict[str, Any]], case: str
) -> None:
    for plain, compiled in packings[case]["losses"]:
        assert compiled == pytest.approx(plain, rel=1e-4)
    assert max(packings[case]["gradients"]) < 1e-3
    assert packings[case]["gradients"][0] < 1e-5, "both start from the same weights"
    assert packings[case]["same_names"]


@NEEDS_COMPILER
def test_a_run_says_how_long_it_compiled_and_keeps_its_curve(world: TinyWorld) -> None:
    world.run(*RUN)
    done = world.run(*RUN, "compute.compile=layer")
    plain, compiled = world.run_folders()
    lines = [line for line in done.stdout.splitlines() if "compil" in line]
    assert len(lines) == 1, "nothing is compiled after the first step"
    assert re.fullmatch(
        r"compiling the decoder layer \.\.\. [1-9]\d* graphs, \d+\.\d s with the first step",
        lines[0],
    )
    for name in ("train/loss", "val/loss", "optim/grad_norm"):
        assert curve(compiled, name) == pytest.approx(curve(plain, name), rel=1e-4)


def test_a_compiler_that_fails_is_one_message(
    world: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken-c++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    done = world.run(*RUN, "compute.compile=layer", check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "compute.compile=layer failed at step 1" in done.stderr
    assert "No working C++ compiler" in done.stderr
    assert "give compute.compile=none" in done.stderr
