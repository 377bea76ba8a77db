"""A sound capture and its verifier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle3.inspection.audit import AuditRequest, run_audit
from eagle3.inspection.facts import Audit
from tests.inspection.planted import CONFIG, Document, capture, make_verifier, save

Look = Callable[..., Audit]


@pytest.fixture(scope="session")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_verifier(tmp_path_factory.mktemp("planted") / "verifier")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return save(tmp_path / "shards", capture(), CONFIG)


@pytest.fixture
def look(tmp_path: Path, verifier: Path) -> Look:
    """Audit a directory, or documents that are saved into one first."""

    def audit(
        what: Path | list[Document], config: dict[str, Any] | None = CONFIG, **options: Any
    ) -> Audit:
        directory = what if isinstance(what, Path) else save(tmp_path / "planted", what, config)
        request: dict[str, Any] = {
            "directory": directory,
            "cache": tmp_path / "cache",
            "verifier": verifier,
            "max_seq_lens": (128, 256),
            "num_workers": 2,
        }
        return run_audit(AuditRequest(**(request | options)), lambda line: None)

    return audit
