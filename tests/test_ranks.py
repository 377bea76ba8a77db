"""Real processes: one rank and two ranks train the same weights; nobody hangs."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from tests.helpers import Document, make_document
from tests.tiny_run import TinyWorld, clean_environment, curve, last_weights, make_world

pytestmark = pytest.mark.ddp
TWO_RANKS = ("trainer.devices=2", "data.val_ratio=0.2", "trainer.checkpoint_every_steps=2")


def uneven_documents() -> list[Document]:
    """Packs of very unequal gates: 9 rows, 1 row, holes; each fills a pack of 10 rows alone."""
    masks = [
        [0, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
        [0, 1, 0, 1, 1, 0, 0, 1, 1, 1],
        [0, 0, 1, 1, 1, 1, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 1, 1, 1, 1],
    ]
    documents = [make_document(10, seed, mask=mask) for seed, mask in enumerate(masks)]
    return documents + [make_document(11, 90 + seed) for seed in range(8)]


def assert_same_training(world: TinyWorld, one: list[str], two: list[str]) -> None:
    common = ("max_seq_len=10", "epochs=2", "data.val_ratio=0.2")
    world.run(*common, *one)
    world.run(*common, *two, "trainer.devices=2")
    first, second = world.run_folders()
    for name in ("train/loss", "train/loss_step/2", "optim/grad_norm", "val/loss"):
        a, b = curve(first, name), curve(second, name)
        assert len(a) == len(b) > 0
        assert a == pytest.approx(b, rel=1e-4), name
    assert not curve(first, "perf/rank_skew")
    skew = curve(second, "perf/rank_skew")
    assert len(skew) == len(curve(second, "train/loss"))
    assert all(1.0 <= value <= 2.0 for value in skew), "largest over mean of two ranks"
    weights, others = last_weights(first), last_weights(second)
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        if weight.is_floating_point():
            torch.testing.assert_close(others[name], weight, rtol=1e-3, atol=2e-5, msg=name)


def test_one_rank_equals_two(tmp_path: Path) -> None:
    world = make_world(tmp_path, uneven_documents())
    assert_same_training(world, ["tokens_per_step=20"], [])


def test_one_rank_equals_two_with_accumulation_a_partial_window_and_a_bad_sample(
    tmp_path: Path,
) -> None:
    """13 documents less validation and one with NaN states, in windows of 6 packs."""
    documents = uneven_documents()
    documents[6].last_hidden[3, 5] = float("nan")
    world = make_world(tmp_path, documents)
    assert_same_training(world, ["tokens_per_step=60"], ["tokens_per_step=60"])
    for folder in world.run_folders():
        assert curve(folder, "data/bad_samples")[-1] > 0


def test_a_rank_without_a_row_does_not_hang(tmp_path: Path) -> None:
    """Three packs on two ranks: in the last step one rank has nothing but padding."""
    documents = [make_document(10, seed) for seed in range(4)]
    world = make_world(tmp_path, documents)
    world.run("max_seq_len=10", "epochs=1", "data.val_ratio=0.2", "trainer.devices=2")
    (folder,) = world.run_folders()
    assert len(curve(folder, "train/loss")) == 2
    assert all(torch.isfinite(w).all() for w in last_weights(folder).values())


def rank_process(launcher: int, rank: int) -> int:
    """Process id of a rank that ``launcher`` has started."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    environments = {c: Path(f"/proc/{c}/environ").read_bytes().split(b"\0") for c in children}
    (found,) = [c for c, variables in environments.items() if f"RANK={rank}".encode() in variables]
    return int(found)


def test_a_rank_that_is_killed_ends_the_run_with_one_message(tmp_path: Path) -> None:
    world = make_world(tmp_path, [make_document(10, seed) for seed in range(12)])
    process = subprocess.Popen(
        world.command("max_seq_len=10", "epochs=100000", "trainer.max_steps=100000", *TWO_RANKS),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=world.root,
        env=clean_environment(),
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 3/"):
            os.kill(rank_process(process.pid, 1), signal.SIGKILL)
            break
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGKILL, output + errors
    assert "rank 1 was ended by signal 9 (SIGKILL)" in errors
    assert "resume=" in errors
    assert "Traceback" not in errors, errors
    assert errors.count("error: ") == 2, "of the launcher and of the rank that was left"
    assert "training: error: another rank ended after" in output
