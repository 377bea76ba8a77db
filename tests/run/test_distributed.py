"""How ranks find each other, and what is said when they do not."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.pytorch.strategies import DDPStrategy

from eagle3.compose import Job
from eagle3.config import Config, TrainerConfig
from eagle3.distributed import (
    Ranks,
    _unless_lost_peer,
    lost_peer,
    must_launch,
    process_group,
    ranks_from_environment,
    resolve_accelerator,
    shared_run,
)
from eagle3.errors import ConfigError
from eagle3.launch import _free_port
from eagle3.names import Accelerator
from eagle3.placement import placement
from tests.tiny_run import clean_environment

ROOT = Path(__file__).parents[2]


def on_cpu(devices: object) -> Config:
    return dataclasses.replace(
        Config(), trainer=TrainerConfig(accelerator=Accelerator.cpu, devices=devices)
    )


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_a_plain_process_is_no_rank() -> None:
    assert ranks_from_environment() is None
    with process_group(on_cpu(1)) as ranks:
        assert ranks == Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1)


LEFT = """
import os
from pathlib import Path
from eagle3.distributed import dist, init_process_group
init_process_group("cpu", 60.0)
import torch
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
del model
dist.destroy_process_group()
print(*[(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()])
"""


def test_no_thread_outlives_the_group() -> None:
    """One that does aborts the process, now and then, when it lets go of a tensor at the end."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", LEFT],
        env=clean_environment() | place | {"MASTER_PORT": str(_free_port())},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "gloo" not in done.stdout
    assert done.stdout.strip()


def test_torchrun_tells_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "5"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    ranks = ranks_from_environment()
    assert ranks == Ranks(rank=5, local_rank=1, world_size=8, local_world_size=4)
    assert ranks.num_nodes == 2


@pytest.mark.parametrize(
    ("devices", "launch"), [(1, False), ([5], False), (2, True), ([4, 5], True)]
)
def test_several_devices_need_several_processes(devices: object, launch: bool) -> None:
    assert must_launch(on_cpu(devices)) is launch


def test_a_rank_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not must_launch(on_cpu(2))


@pytest.mark.parametrize("world_size", ["2", "4"])
def test_other_processes_than_devices_are_refused(
    world_size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", world_size)
    with (
        pytest.raises(ConfigError, match=rf"{world_size} process.*asks for 3.*nproc_per_node=3"),
        process_group(on_cpu(3)),
    ):
        pass


def test_processes_of_the_cpu_are_counted() -> None:
    assert placement(on_cpu([0, 1])) == {
        "accelerator": "cpu",
        "devices": 2,
        "num_nodes": 1,
        "strategy": "auto",
        "use_distributed_sampler": False,
    }


def test_several_ranks_average_in_large_buckets_without_sending_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every rank reads the frozen tensors itself; gradients come all at once, after the unroll."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    strategy = placement(on_cpu(2))["strategy"]
    assert isinstance(strategy, DDPStrategy)
    assert strategy._ddp_kwargs == {
        "gradient_as_bucket_view": True,
        "broadcast_buffers": False,
        "bucket_cap_mb": 256,
    }


def test_missing_cards_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    gpus = TrainerConfig(accelerator=Accelerator.gpu, devices=[1, 3])
    assert resolve_accelerator(gpus) == "gpu"
    with pytest.raises(ConfigError, match=r"devices=\[4, 5\].*4 card"):
        resolve_accelerator(dataclasses.replace(gpus, devices=[4, 5]))
    with pytest.raises(ConfigError, match=r"devices=8.*4 card"):
        resolve_accelerator(dataclasses.replace(gpus, devices=8))


def test_a_single_process_makes_its_own_folder(tmp_path: Path) -> None:
    config = on_cpu(1)
    config = dataclasses.replace(
        config, paths=dataclasses.replace(config.paths, output=str(tmp_path))
    )
    run = shared_run(config, Job(), Ranks())
    assert run.is_main
    assert run.directory.parent == tmp_path


def start_rank(code: str, rank: int, port: int) -> subprocess.Popen[str]:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
    environment = clean_environment() | {"MASTER_ADDR": "127.0.0.1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment | {name: str(value) for name, value in ranks.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


MEET = "from eagle3.distributed import init_process_group; init_process_group('cpu', 60.0)"
SHARE = """
import dataclasses, sys, pathlib
from eagle3.compose import Job
from eagle3.config import Config, TrainerConfig
from eagle3.distributed import process_group, shared_run
from eagle3.names import Accelerator
config = Config(trainer=TrainerConfig(accelerator=Accelerator.cpu, devices=2))
config = dataclasses.replace(config, paths=dataclasses.replace(config.paths, output=OUTPUT))
with process_group(config) as ranks:
    run = shared_run(config, Job(), ranks)
    print(run.directory, run.id, run.is_main)
"""


@pytest.mark.ddp
def test_a_rank_that_sleeps_ends_the_wait_with_remedies() -> None:
    port = _free_port()
    waiting = start_rank(MEET.replace("60.0", "3.0"), 0, port)
    sleeping = start_rank(f"import time; time.sleep(30); {MEET}", 1, port)
    try:
        output, _ = waiting.communicate(timeout=60)
    finally:
        sleeping.kill()
        sleeping.communicate()
    assert waiting.returncode == 1
    assert "did not end within 3 s" in output
    for remedy in ("NCCL_P2P_DISABLE=1", "GLOO_SOCKET_IFNAME", "rank did not start"):
        assert remedy in output


@pytest.mark.ddp
def test_two_ranks_share_one_folder(tmp_path: Path) -> None:
    port = _free_port()
    code = SHARE.replace("OUTPUT", repr(str(tmp_path)))
    ranks = [start_rank(code, rank, port) for rank in range(2)]
    outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    first, second = (output.split() for output in outputs)
    assert first[:2] == second[:2]
    assert (first[2], second[2]) == ("True", "False")
    assert [str(path) for path in tmp_path.iterdir()] == [first[0]]
    assert Path(first[0], "provenance.json").is_file()


GONE = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4526."


def test_only_the_end_of_another_rank_is_taken_for_it() -> None:
    assert lost_peer(RuntimeError(GONE))
    assert lost_peer(RuntimeError("NCCL error: remote process exited or there was a network error"))
    assert not lost_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not lost_peer(ConnectionResetError("Connection reset by peer"))


def test_errors_that_cannot_be_raised_are_shown_unless_a_rank_is_gone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Dying:
        def __init__(self, words: str) -> None:
            self.words = words

        def __del__(self) -> None:
            raise RuntimeError(self.words)

    monkeypatch.setattr(sys, "unraisablehook", _unless_lost_peer)
    Dying(GONE)
    assert capsys.readouterr().err == ""
    Dying("something else")
    assert "RuntimeError: something else" in capsys.readouterr().err
