"""``trainer.strategy=fsdp2`` in real processes: what it trains, saves, goes on from and refuses."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.compose import compose_config
from eagle3.config import Config
from eagle3.launch import _free_port
from eagle3.names import StrategyName
from eagle3.planning import plan
from tests.run.sharded_steps import CASES
from tests.test_ranks import uneven_documents
from tests.test_resume import assert_same_run, losses
from tests.tiny_run import TinyWorld, clean_environment, curve, last_weights, make_world

ROOT = Path(__file__).parents[2]
RUN = (
    "max_seq_len=10",
    "epochs=2",
    "data.val_ratio=0.2",
    "tokens_per_step=40",
    "trainer.checkpoint_every_steps=2",
    "trainer.keep_last=9",
    "optim.schedule=constant",
    "trainer.devices=2",
)
STEP, EPOCH_END = "step00000002.ckpt", "step00000003.ckpt"


@pytest.fixture(scope="module")
def gradients() -> dict[str, dict[str, float]]:
    """What two ranks found, by case."""
    port = str(_free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.run.sharded_steps"],
            cwd=ROOT,
            env=clean_environment()
            | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": port},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    found: dict[str, dict[str, float]] = json.loads(outputs[0].splitlines()[-1])
    return found


@pytest.mark.ddp
@pytest.mark.parametrize("case", CASES)
def test_sharded_gradients_are_those_of_a_whole_drafter(
    case: str, gradients: dict[str, dict[str, float]]
) -> None:
    """With packs that have no loss, several packs in a step, and a validation before."""
    found = gradients[case]
    assert found["gradients"] >= 12
    assert found["difference"] < 2e-6
    assert found["norm_difference"] < 2e-6
    assert 0.45 < found["held"] < 0.55


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    return make_world(tmp_path_factory.mktemp("world"), uneven_documents())


@pytest.fixture(scope="module")
def replicated(world: TinyWorld) -> Path:
    """The run with DDP."""
    world.run(*RUN)
    return world.run_folders()[-1]


@pytest.fixture(scope="module")
def sharded(world: TinyWorld, replicated: Path) -> Path:
    world.run(*RUN, "trainer=fsdp2")
    return world.run_folders()[-1]


def read(folder: Path, name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(folder / "checkpoints" / name, weights_only=True)
    return loaded


def described(value: Any) -> Any:
    """Names, shapes and dtypes; values only of what is no float."""
    if isinstance(value, dict):
        return {key: described(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [described(each) for each in value]
    if isinstance(value, torch.Tensor):
        return type(value), tuple(value.shape), value.dtype, value.device.type
    return type(value)


@pytest.mark.ddp
def test_it_trains_what_ddp_trains(replicated: Path, sharded: Path) -> None:
    for name in ("train/loss", "train/loss_step/2", "val/loss", "optim/grad_norm"):
        a, b = curve(replicated, name), curve(sharded, name)
        assert len(a) == len(b) > 0
        assert b == pytest.approx(a, rel=1e-5), name
    for part in ("fc", "layer", "lm_head"):
        name = f"optim/update_ratio/{part}"
        assert curve(sharded, name) == pytest.approx(curve(replicated, name), rel=1e-3), name
    weights, expected = last_weights(sharded), last_weights(replicated)
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.ddp
def test_a_checkpoint_is_that_of_ddp(replicated: Path, sharded: Path) -> None:
    a, b = read(replicated, STEP), read(sharded, STEP)
    assert described(a) == described(b)
    (moments,), (expected,) = b["optimizer_states"], a["optimizer_states"]
    assert moments["param_groups"] == expected["param_groups"]
    for number, state in expected["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(moments["state"][number][name], value, rtol=1e-3, atol=1e-6)


@pytest.mark.ddp
def test_a_run_that_goes_on_is_the_run_that_never_stopped(
    world: TinyWorld, sharded: Path, tmp_path: Path
) -> None:
    """From its own earlier checkpoint, within an epoch; to the bit."""
    whole = tmp_path / "whole"
    shutil.copytree(sharded, whole)
    world.run(*RUN, "trainer=fsdp2", f"resume={sharded / 'checkpoints' / STEP}")
    assert_same_run(sharded, whole)


@pytest.mark.ddp
@pytest.mark.parametrize(
    ("of", "name", "into"),
    [
        ("replicated", STEP, ("trainer=fsdp2",)),
        ("sharded", STEP, ()),
        ("sharded", EPOCH_END, ("trainer.devices=1",)),
    ],
    ids=["ddp_to_fsdp2", "fsdp2_to_ddp", "fsdp2_to_one_rank"],
)
def test_any_strategy_goes_on_from_any(
    of: str, name: str, into: tuple[str, ...], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Within an epoch; on another number of ranks, whose plan is another, from an epoch's end."""
    folder: Path = request.getfixturevalue(of)
    other = make_world(tmp_path, uneven_documents())
    other.run(*RUN, *into, f"resume={folder / 'checkpoints' / name}")
    (found,) = other.run_folders()
    begin = read(folder, name)["global_step"]
    expected = {step: loss for step, loss in losses(folder).items() if step > begin}
    assert expected
    assert losses(found) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "setting", ["optim=muon", "compute.compile=layer", "optim.pull_to_start=0.1"]
)
def test_what_needs_whole_weights_is_refused_at_once(setting: str, tmp_path: Path) -> None:
    world = make_world(tmp_path, uneven_documents()[:1])
    init = [f"paths.init={tmp_path}"] if "pull" in setting else []
    done = world.run("trainer=fsdp2", "trainer.devices=2", setting, *init, check=False)
    assert done.returncode == 2
    assert "needs whole weights, and trainer.strategy=fsdp2 leaves" in done.stderr
    assert "trainer.strategy=ddp" in done.stderr
    assert not world.run_folders()


def kimi(strategy: StrategyName) -> Config:
    config = compose_config(["experiment=kimi_100k"])
    return dataclasses.replace(
        config, trainer=dataclasses.replace(config.trainer, strategy=strategy)
    )


def test_the_plan_shares_weights_and_moments_over_the_ranks() -> None:
    """Independent arithmetic: 1.19 G weights in float32, on four cards."""
    sharded, replicated = (
        {part.name: part.num_bytes / 1e9 for part in plan(kimi(name)).resident}
        for name in (StrategyName.fsdp2, StrategyName.ddp)
    )
    assert sharded["weights"] == pytest.approx(4.764 / 4, abs=0.01)
    assert sharded["optimizer states"] == pytest.approx(9.528 / 4, abs=0.01)
    assert sharded["gradients of the own part"] == pytest.approx(4.764 / 4, abs=0.01)
    assert sharded["weights gathered"] == pytest.approx(4.764, abs=0.01)
    assert sharded["buckets that ranks exchange"] == 0
    assert "weights gathered" not in replicated
    totals = [plan(kimi(StrategyName.fsdp2), world_size=ranks).total_bytes for ranks in (4, 8, 16)]
    assert totals == sorted(totals, reverse=True)
    alone = [plan(kimi(name), world_size=1) for name in (StrategyName.fsdp2, StrategyName.ddp)]
    assert alone[0] == alone[1], "one rank has nothing to share"
