"""The list of known troubles names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LISTED = (ROOT / "tests" / "FIELD_PROBLEMS.md").read_text()
REFERENCES = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`?", LISTED)))


@pytest.mark.parametrize(("file", "test"), REFERENCES, ids=lambda value: value)
def test_reference_exists(file: str, test: str) -> None:
    source = (ROOT / file).read_text()
    assert not test or f"def {test}(" in source


def test_every_trouble_has_a_guard() -> None:
    rows = [line for line in LISTED.splitlines() if re.match(r"\| [A-Z]\d", line)]
    assert len(rows) == 85
    assert all("`tests/" in row or "cannot occur" in row for row in rows)
