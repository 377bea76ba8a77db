"""Eight steps are four, a restart and four: every schedule and optimizer, with accumulation."""

from __future__ import annotations

import csv
import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from eagle3.compose import Job, compose_config
from eagle3.fit import fit
from eagle3.names import OptimizerName, Schedule
from eagle3.provenance import start_run
from eagle3.resume import begin
from tests.tiny_run import TinyWorld, last_weights, make_world, some_documents

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

STEPS = 8
CASES = list(itertools.product(Schedule, OptimizerName, (1, 4)))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyWorld]:
    """One of its documents cannot be trained, which is met before the restart and after."""
    documents = some_documents(14)
    documents[4].aux_hidden[2, 3] = float("inf")
    return make_world(tmp_path_factory.mktemp("world"), documents)


def metrics(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        found = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in found]


@pytest.mark.parametrize(("schedule", "optimizer", "accumulation"), CASES)
def test_a_restart_changes_nothing(
    world: TinyWorld, schedule: Schedule, optimizer: OptimizerName, accumulation: int
) -> None:
    """Warmup over more steps than the first half has, so that the rate matters at the restart."""
    settings = (
        f"optim.schedule={schedule}",
        f"optim.optimizer={optimizer}",
        f"tokens_per_step={16 * accumulation}",
        "max_seq_len=16",
        "noise_std=0.1",
        "epochs=9",
        f"trainer.max_steps={STEPS}",
        "trainer.checkpoint_every_steps=1",
        "trainer.keep_last=9",
        "optim.warmup_ratio=0.7",
        "optim.clip_norm=0.5",
    )
    config = compose_config([*world.command()[3:], *settings])
    begun = start_run(config, Job())
    fit(config, begun)
    expected, weights = metrics(begun.directory), last_weights(begun.directory)
    middle = begun.directory / "checkpoints" / f"step{STEPS // 2:08d}.ckpt"
    continued = dataclasses.replace(config, resume=str(middle))
    run = begin(continued, Job())
    assert run.continues
    fit(continued, run)
    assert metrics(begun.directory) == expected
    trained = [row for row in expected if row["train/loss"]]
    skipped = 1 if accumulation == 1 else 0  # the bad document is all that its window has
    assert len(trained) == STEPS + skipped
    assert float(trained[-1]["optim/skipped_steps"]) == skipped
    assert any(0 < float(row["optim/clip_frac"]) <= 1 for row in expected if row["optim/clip_frac"])
    if accumulation == 4:
        counts = [float(row["data/bad_samples"]) for row in expected if row["data/bad_samples"]]
        assert 0 < counts[STEPS // 2 - 1] < counts[-1], "in two epochs"
    found = last_weights(begun.directory)
    assert all(torch.equal(weight, found[name]) for name, weight in weights.items())
