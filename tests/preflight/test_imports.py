"""A mistyped command is told so by the cheap part of the program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_run import clean_environment


@pytest.mark.parametrize("command", ["train", "preflight"])
def test_a_typo_waits_for_no_heavy_import(command: str, tmp_path: Path) -> None:
    """Lightning is one that ends the process as soon as anybody imports it."""
    package = tmp_path / "lightning"
    package.mkdir()
    (package / "__init__.py").write_text("import os\nos._exit(77)\n")
    done = subprocess.run(
        [sys.executable, "-m", f"eagle3.{command}", "max_seqlen=64"],
        env=clean_environment() | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "unknown key 'max_seqlen'; the nearest valid key is 'max_seq_len'" in done.stderr
