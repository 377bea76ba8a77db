"""What people get to see: the table, a marked sample, the picture."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from eagle3.errors import DataError
from eagle3.inspection.figure import draw_audit
from eagle3.inspection.shown import marked, shown_document
from eagle3.inspection.table import aligned, size, table
from tests.inspection.conftest import Look
from tests.inspection.planted import capture


def numbers(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def test_supervised_tokens_are_marked() -> None:
    ids, mask = np.arange(6), np.array([0, 0, 1, 1, 0, 1], np.bool_)
    shown = shown_document("data_0.pt", ids, mask, lambda ids: f"<{numbers(list(ids))}>")
    assert [(span.supervised, span.tokens) for span in shown.spans] == [
        (False, 2),
        (True, 2),
        (False, 1),
        (True, 1),
    ]
    assert marked(shown, colour=False) == "<0 1>[[<2 3>]]<4>[[<5>]]"
    assert marked(shown, colour=True) == "<0 1>\033[1;32m<2 3>\033[0m<4>\033[1;32m<5>\033[0m"


def test_long_spans_are_cut_in_the_middle() -> None:
    shown = shown_document("d", np.arange(2), np.zeros(2, np.bool_), lambda ids: "a" * 5000 + "end")
    text = marked(shown, colour=False)
    assert "4,303 characters" in text
    assert text.endswith("end")
    assert len(text) < 800


def test_columns_are_aligned() -> None:
    assert aligned([["name", "n"], ["a", "1,000"]]) == ["  name      n", "  a     1,000"]


def test_sizes_are_said_in_both_units() -> None:
    assert size(2**30) == "1.07 GB (1.00 GiB)"


def test_the_table_holds_every_section(look: Look, shards: Path) -> None:
    audit = look(shards)
    text = table(audit, colour=False)
    for expected in (
        "speculators v1, bfloat16, 12 files",
        "128 bytes of states a token",
        "3 (data_0.pt), entering [2, 4, 6] (data_config.json)",
        "pre_norm (data_config.json)",
        "entering 4",
        "GB/s for 10,000 tokens/s",
        "logit lens",
        "ok       on-policy",
        "lost if truncated",
        "0 all-zero, 0 all-one",
        "0 copies; 12 prompts",
        audit.directory.fingerprint,
    ):
        assert expected in text
    assert "[[w" in text  # decoded by the verifier's tokenizer
    assert "\033" not in text
    assert max(map(len, text.splitlines())) < 1000


def test_ids_stand_for_text_without_a_tokenizer(look: Look, shards: Path) -> None:
    audit = look(shards, verifier=None)
    first = capture()[0]["input_ids"][:20].tolist()
    assert audit.shown[0].spans[0].text == numbers(first)


def test_findings_end_the_table_with_what_to_do(look: Look) -> None:
    documents = capture()
    documents[1]["hidden_states"][0][4] = float("nan")
    lines = table(look(documents), colour=False).splitlines()
    (at,) = (k for k, line in enumerate(lines) if line.startswith("  STOP"))
    assert "finite states" in lines[at]
    assert lines[at + 1].strip().startswith("-> capture again")


@pytest.mark.parametrize("with_verifier", [True, False], ids=["verifier", "no verifier"])
def test_the_picture_is_a_png_with_something_in_it(
    look: Look, shards: Path, tmp_path: Path, with_verifier: bool
) -> None:
    audit = look(shards) if with_verifier else look(shards, verifier=None)
    path = tmp_path / "new" / "audit.png"
    draw_audit(audit, path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = matplotlib.image.imread(path)
    assert pixels.shape[:2] == (880, 1320)
    for rows in np.array_split(pixels, 2):
        for panel in np.array_split(rows, 2, axis=1):
            assert len(np.unique(panel.reshape(-1, panel.shape[-1]), axis=0)) > 20


def test_a_picture_that_cannot_be_written_is_an_error(
    look: Look, shards: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="Give --figure another path"):
        draw_audit(look(shards), tmp_path / "file" / "audit.png")
