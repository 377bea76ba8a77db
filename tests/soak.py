"""A long series of kills: does a run that dies twenty times end as the one that never died?

    python -m tests.soak [--kills 20] [--seed 0] [--quick] [--out FILE]

Two tiny runs, on one rank and on two, save every eight optimizer steps, at epoch ends, and the best
after validations. Each is run once without a fault. Then it is started again and again with
``resume=auto``: every start but the last is ended by SIGKILL at a random step, after a save and
before the next. It goes to all processes, or on two ranks by turns to one of the ranks alone,
after which the others must end by themselves. In the end weights, metric history and best must be
those of the run without a fault, to the bit.

Prints a line a kill and, as its last line, one JSON object. Exit status 1: something differed, a
kill came too early or at the run's end, or fewer than half of the starts resumed within an epoch.
``--quick``: three kills on one rank. ``--out``: the kills as CSV.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tests.test_resume import rank_process, rows, signal_all, wait_until
from tests.tiny_run import TinyWorld, clean_environment, last_weights, make_world, some_documents

SAVE_EVERY = 8
EPOCHS = 2
DOCUMENTS = 120
RUN = (
    "max_seq_len=16",
    f"epochs={EPOCHS}",
    "noise_std=0.1",
    "data.num_workers=2",
    f"trainer.checkpoint_every_steps={SAVE_EVERY}",
    "val.every_steps=21",
)
_RESUMED = re.compile(r"goes on after step (\d+) \((\S+)\)")


@dataclass(frozen=True)
class Kill:
    """One death, and the start that followed it."""

    ranks: int
    number: int
    victim: str
    """``all`` processes, or a rank."""
    planned_step: int
    """After which the kill was to come."""
    killed_step: int
    """The last that the run had logged."""
    resumed_step: int
    """Of the checkpoint that the next start went on from."""
    checkpoint: str
    mid_epoch: bool
    """That checkpoint lies within an epoch."""
    in_a_write: bool
    """A part of a checkpoint was left on the disk."""


@dataclass(frozen=True)
class Death:
    """A kill of which it is not known yet what follows."""

    ranks: int
    victim: str
    planned_step: int
    killed_step: int
    in_a_write: bool


@dataclass(frozen=True)
class Series:
    """All deaths of a run, and how it ended."""

    kills: tuple[Kill, ...]
    weights_equal: bool
    metrics_equal: bool
    best_equal: bool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=20, help="over both runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="three kills on one rank")
    parser.add_argument("--out", type=Path, help="write the kills as CSV")
    args = parser.parse_args()
    started = time.monotonic()
    half = args.kills // 2
    plan = {1: 3} if args.quick else {1: args.kills - half, 2: half}
    print(
        f"{'ranks':>5} {'kill':>5} {'victim':>7} {'planned':>8} {'killed':>7} {'resumed':>8}  from"
    )
    series: list[Series] = []
    for ranks, count in plan.items():
        series.append(soak(ranks, count, args.seed))
        found = faults_of(series[-1])
        print(f"faults on {ranks} rank(s): {', '.join(found) or 'none'}", flush=True)
        if args.out is not None:
            write_csv(args.out, [kill for one in series for kill in one.kills])
    kills = [kill for one in series for kill in one.kills]
    faults = [fault for one in series for fault in faults_of(one)]
    figures = {
        "kills": len(kills),
        "resumed_mid_epoch": sum(kill.mid_epoch for kill in kills),
        "in_a_write": sum(kill.in_a_write for kill in kills),
        "steps_done_again": sum(kill.killed_step - kill.resumed_step for kill in kills),
        "bit_equal": all(one.weights_equal for one in series),
        "same_metrics": all(one.metrics_equal for one in series),
        "minutes": round((time.monotonic() - started) / 60, 1),
    }
    print(json.dumps(figures))
    return int(bool(faults))


def soak(ranks: int, kills: int, seed: int) -> Series:
    """Run once whole and once with ``kills`` deaths, on so many ranks."""
    overrides = (*RUN, f"trainer.devices={ranks}")
    with tempfile.TemporaryDirectory(prefix="soak_") as work:
        whole_world = make_world(Path(work) / "whole", some_documents(DOCUMENTS))
        whole_world.run(*overrides)
        (whole,) = whole_world.run_folders()
        world = make_world(Path(work) / "killed", some_documents(DOCUMENTS))
        total = last_step(whole)
        print(f"{ranks} rank(s): the run without a fault has {total} steps", flush=True)
        found: list[Kill] = []
        death: Death | None = None
        randomly = random.Random(f"{seed} {ranks}")
        for index, planned in enumerate(kill_points(total, kills, randomly)):
            rank = randomly.randrange(ranks) if ranks > 1 and index % 2 else None
            log = start_and_kill(world, overrides, planned, rank)
            if death is not None:
                found.append(followed_by(death, log, len(found) + 1, total // EPOCHS))
            (folder,) = world.run_folders()
            partial = any((folder / "checkpoints").glob(".*.ckpt.tmp"))
            victim = "all" if rank is None else f"rank {rank}"
            death = Death(ranks, victim, planned, last_step(folder), partial)
        assert death is not None
        log = world.run(*overrides, "resume=auto").stdout
        found.append(followed_by(death, log, len(found) + 1, total // EPOCHS))
        (folder,) = world.run_folders()
        return Series(
            tuple(found),
            same_weights(folder, whole),
            rows(folder) == rows(whole),
            same_best(folder, whole),
        )


def followed_by(death: Death, log: str, number: int, epoch_steps: int) -> Kill:
    """A kill and the start after it, of which ``log`` is the output; told at once, for a long wait
    that says nothing looks as if it had come to a stop."""
    step, file = resumed_from(log)
    kill = Kill(
        **asdict(death),
        number=number,
        resumed_step=step,
        checkpoint=file,
        mid_epoch=bool(step % epoch_steps),
    )
    print(f"{kill.ranks:>5} {kill.number:>5} {kill.victim:>7} {kill.planned_step:>8} "
          f"{kill.killed_step:>7} {kill.resumed_step:>8}  {kill.checkpoint}",
          flush=True)  # fmt: skip
    return kill


def kill_points(total: int, kills: int, randomly: random.Random) -> list[int]:
    """Distinct steps in rising order, each after a save and at least two before the next.

    The last steps are left out: on a busy machine the run could be over before the signal comes.
    """
    steps = range(SAVE_EVERY, total - 2 * SAVE_EVERY)
    possible = [step for step in steps if 0 < step % SAVE_EVERY < SAVE_EVERY - 1]
    return sorted(randomly.sample(possible, kills))


def faults_of(series: Series) -> list[str]:
    """What was not as it must be."""
    where = f"{series.kills[0].ranks} rank(s)"
    checks = {
        "the final weights differ": series.weights_equal,
        "the metric history differs": series.metrics_equal,
        "the best checkpoint differs": series.best_equal,
        "a start had nothing to go on from": all(k.resumed_step > 0 for k in series.kills),
        "a kill came at a save": all(k.killed_step > k.resumed_step for k in series.kills),
        "fewer than half resumed within an epoch": (
            2 * sum(kill.mid_epoch for kill in series.kills) >= len(series.kills)
        ),
    }
    return [f"{where}: {fault}" for fault, fine in checks.items() if not fine]


def start_and_kill(world: TinyWorld, overrides: Sequence[str], step: int, rank: int | None) -> str:
    """SIGKILL as soon as ``step`` is logged, to one rank or to all; what was printed until then.

    Raises:
        subprocess.TimeoutExpired: the others did not end after the loss of ``rank``.
    """
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            world.command(*overrides, "resume=auto"),
            cwd=world.root,
            env=clean_environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            wait_until(process, lambda: any(last_step(f) >= step for f in world.run_folders()))
            if rank is not None:
                os.kill(rank_process(process.pid, rank), signal.SIGKILL)
                process.wait(timeout=120)
        finally:
            signal_all(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        return log.read()


def last_step(folder: Path) -> int:
    """Of the last whole row in ``metrics.csv``; 0 before there is one."""
    path = folder / "metrics.csv"
    if not path.is_file():
        return 0
    lines = path.read_bytes().split(b"\n")[1:-1]
    return int(float(lines[-1].split(b",")[0])) if lines else 0


def resumed_from(log: str) -> tuple[int, str]:
    """Step and file of the checkpoint that a start went on from; 0 where it began anew."""
    found = _RESUMED.search(log)
    return (0, "") if found is None else (int(found[1]), found[2])


def same_weights(folder: Path, whole: Path) -> bool:
    weights, expected = last_weights(folder), last_weights(whole)
    return weights.keys() == expected.keys() and all(
        torch.equal(weight, expected[name]) for name, weight in weights.items()
    )


def same_best(folder: Path, whole: Path) -> bool:
    found, expected = (
        torch.load(f / "checkpoints" / "best.ckpt", weights_only=True) for f in (folder, whole)
    )
    return bool(found["global_step"] == expected["global_step"])


def write_csv(path: Path, kills: Sequence[Kill]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(Kill.__dataclass_fields__), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(kill) for kill in kills)


if __name__ == "__main__":
    sys.exit(main())
