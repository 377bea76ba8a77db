"""Verifiers on disk, made once per session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eagle3.verifier.smollm2 import ensure_smollm2
from tests.tiny_verifier import make_tiny_verifier

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def tiny_verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a random four-layer Llama."""
    return make_tiny_verifier(tmp_path_factory.mktemp("verifier") / "tiny")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Directory of the real demo verifier; kept between sessions."""
    return ensure_smollm2(Path(os.environ.get("EAGLE3_TEST_CACHE", ROOT / ".cache" / "test")))
