from __future__ import annotations

from pathlib import Path

import pytest

from tests.capturing.worlds import make_chat_verifier


@pytest.fixture(scope="session")
def chat_verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_verifier(tmp_path_factory.mktemp("chat") / "tiny")
