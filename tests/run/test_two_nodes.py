"""Two machines, as two torchrun agents that meet on loopback: one run, and one way to stop it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from eagle3.launch import _free_port
from tests.test_resume import logged, rows
from tests.tiny_run import TinyWorld, clean_environment, last_weights, make_world, some_documents

pytestmark = pytest.mark.ddp
RUN = ("max_seq_len=16", "epochs=2", "data.val_ratio=0.2", "trainer.checkpoint_every_steps=2")


@contextmanager
def agent(
    world: TinyWorld, node: int, port: int, *overrides: str
) -> Iterator[subprocess.Popen[bytes]]:
    """``torchrun`` of one machine of two, with one rank; it writes to ``node{node}.log``."""
    python, *command = world.command(*RUN, *overrides)
    torchrun = [
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc_per_node=1",
        "--rdzv_backend=c10d",
        f"--rdzv_endpoint=127.0.0.1:{port}",
        "--rdzv_id=two_nodes",
        "--local-addr=127.0.0.1",
    ]
    with (world.root / f"node{node}.log").open("w") as log:
        process = subprocess.Popen(
            [python, "-m", *torchrun, *command],
            cwd=world.root,
            env=clean_environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()  # which torchrun passes on to its rank
            process.wait()


@contextmanager
def two_nodes(world: TinyWorld, *overrides: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    with ExitStack() as started:
        port = _free_port()
        yield [started.enter_context(agent(world, n, port, *overrides)) for n in range(2)]


def logs(world: TinyWorld) -> list[str]:
    return [(world.root / f"node{node}.log").read_text() for node in range(2)]


def test_two_nodes_are_the_same_run_as_two_ranks_of_one(tmp_path: Path) -> None:
    world = make_world(tmp_path, some_documents(16))
    with two_nodes(world) as agents:
        codes = [process.wait(timeout=300) for process in agents]
    assert codes == [0, 0], logs(world)
    (of_two,) = world.run_folders()
    assert sum("run folder:" in log for log in logs(world)) == 1, "only rank 0 speaks"
    world.run(*RUN, "trainer.devices=2")
    of_one = world.run_folders()[-1]
    assert rows(of_two) == rows(of_one)
    weights, expected = last_weights(of_two), last_weights(of_one)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())


def test_sigterm_to_the_agent_of_one_node_saves_the_run_of_both(tmp_path: Path) -> None:
    """torchrun ends with 1, though its ranks have ended with 75: the run's own words count."""
    world = make_world(tmp_path, some_documents(16))
    with two_nodes(world, "epochs=400") as agents:
        deadline = time.monotonic() + 300
        while not (world.run_folders() and logged(world) >= 3):
            assert all(process.poll() is None for process in agents), logs(world)
            assert time.monotonic() < deadline, logs(world)
            time.sleep(0.05)
        agents[1].send_signal(signal.SIGTERM)
        codes = [process.wait(timeout=300) for process in agents]
    assert codes == [1, 1], logs(world)
    said = "".join(logs(world))
    assert f"stopped by a signal, all is saved (exit code {os.EX_TEMPFAIL})" in said
    (folder,) = world.run_folders()
    steps = len([row for row in rows(folder) if row.get("train/loss")])
    newest = max((folder / "checkpoints").glob("step*.ckpt"))
    assert newest.name == f"step{steps:08d}.ckpt"
