"""kill -9 at any moment, a move to another disk, parts of several machines: the same bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eagle3.capturing.merging import merge
from eagle3.data.native_manifest import read_manifest
from eagle3.errors import DataError
from tests.capturing.kills import ROOT, command, finish, kill_when, lines_of
from tests.capturing.worlds import TALK, content, run, samples, settings, token_lines, write_lines
from tests.tiny_run import clean_environment


@pytest.fixture(scope="module")
def straight(chat_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Captures that were left alone, and the files with what they captured."""
    root = tmp_path_factory.mktemp("straight")
    for kind, lines in (("tokens", token_lines(150)), ("prompts", TALK * 5)):
        given = write_lines(root / f"{kind}.jsonl", lines)
        finish(chat_verifier, root / kind, f"{kind}={given}")
    return root


@pytest.mark.parametrize(
    ("kind", "file", "limit"),
    [("tokens", "journal", 9), ("prompts", "answers.jsonl", 3), ("prompts", "journal", 6)],
    ids=["states", "answers", "states after answers"],
)
def test_kill_9_and_start_again(
    chat_verifier: Path, straight: Path, tmp_path: Path, kind: str, file: str, limit: int
) -> None:
    given = f"{kind}={straight / f'{kind}.jsonl'}"
    out = tmp_path / "killed"
    journal = out / ".writing" / file
    assert kill_when(chat_verifier, out, lambda: lines_of(journal) > limit, given)
    assert not (out / "manifest.json").exists()
    moved = out.rename(tmp_path / "moved")
    said = finish(chat_verifier, moved, given)
    assert "captured: " in said
    if file == "journal":
        assert "are there already" in said
    assert content(moved) == content(straight / kind)
    assert not (moved / ".writing").exists()


def test_a_disk_that_is_full_ends_it_and_it_goes_on(
    chat_verifier: Path, straight: Path, tmp_path: Path
) -> None:
    """No file may be longer than 48 KiB, which a shard is."""
    given = f"tokens={straight / 'tokens.jsonl'}"
    out = tmp_path / "full"
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 48 && exec "$@"', "bash", *command(chat_verifier, out, given)],
        capture_output=True, text=True, check=False, cwd=ROOT, env=clean_environment(), timeout=300,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "the disk is full" in done.stderr
    assert "it goes on where it stopped" in done.stderr
    finish(chat_verifier, out, given)
    assert content(out) == content(straight / "tokens")


def test_a_mistake_on_the_command_line_is_one_message(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "eagle3.capture", "verifer=x"],
        capture_output=True, text=True, check=False, cwd=tmp_path, env=clean_environment(),
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 2
    assert "unknown key 'verifer'; the nearest valid key is 'verifier'" in done.stderr
    assert "Traceback" not in done.stderr


def test_parts_of_several_machines_are_one_capture(chat_verifier: Path, tmp_path: Path) -> None:
    tokens = write_lines(tmp_path / "tokens.jsonl", token_lines(50))
    whole = settings(chat_verifier, tmp_path / "whole", tokens=str(tokens))
    run(whole)
    parts = []
    for part in range(3):
        out = tmp_path / f"part{part}"
        found, _ = run(settings(chat_verifier, out, tokens=str(tokens), part=part, parts=3))
        assert found.documents in (16, 17)
        parts.append(str(out))
    joined = settings(chat_verifier, tmp_path / "joined", merge=[parts[2], parts[0], parts[1]])
    said: list[str] = []
    manifest = merge(joined, said.append)
    alone = read_manifest(tmp_path / "whole")
    for name in ("num_samples", "num_tokens", "num_supervised_tokens", "fingerprint", "states"):
        assert getattr(manifest, name) == getattr(alone, name), name
    assert read_manifest(tmp_path / "joined") == manifest
    pairs = zip(samples(tmp_path / "joined"), samples(tmp_path / "whole"), strict=True)
    for one, other in pairs:
        assert torch.equal(one.input_ids, other.input_ids)
        assert torch.equal(one.loss_mask, other.loss_mask)
        torch.testing.assert_close(one.aux_hidden, other.aux_hidden, rtol=2**-6, atol=1e-3)
    record = json.loads((tmp_path / "joined" / "capture.json").read_text())
    assert (record["documents"], record["parts"], record["merged_parts"]) == (50, 1, 3)


def test_parts_that_do_not_belong_together_are_refused(chat_verifier: Path, tmp_path: Path) -> None:
    tokens = write_lines(tmp_path / "tokens.jsonl", token_lines(12))
    for name, changes in (
        ("one", {"part": 0, "parts": 2}),
        ("two", {"part": 1, "parts": 2}),
        ("other", {"part": 1, "parts": 2, "aux_layer_ids": [0, 1, 2]}),
    ):
        run(settings(chat_verifier, tmp_path / name, tokens=str(tokens), **changes))

    def merged(*names: str) -> None:
        directories = [str(tmp_path / name) for name in names]
        merge(settings(chat_verifier, tmp_path / "out", merge=directories), lambda _: None)

    with pytest.raises(DataError, match=r"found the parts \[0\], expected 0 to 1"):
        merged("one")
    with pytest.raises(DataError, match=r"found the parts \[0, 0\]"):
        merged("one", "one")
    with pytest.raises(DataError, match="parts of different captures"):
        merged("one", "other")
    with pytest.raises(DataError, match=r"found no manifest\.json"):
        merged("one", "nowhere")
    assert not (tmp_path / "out").exists()
    merged("one", "two")
    with pytest.raises(DataError, match="expected a new or empty directory"):
        merged("one", "two")
