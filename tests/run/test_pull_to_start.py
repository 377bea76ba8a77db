"""The L2 pull to the start: its gradient, what it does to a run, and that a restart keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle3.optim import PullToStart
from tests.helpers import tiny_drafter
from tests.tiny_run import TinyWorld, curve, last_weights, make_world, some_documents

QUICK = ("max_seq_len=32", "data.val_ratio=0.2", "val.max_seq_len=64")
PULL = 0.05


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    world = make_world(tmp_path_factory.mktemp("world"), some_documents(24))
    world.run(*QUICK, "epochs=1")
    return world


@pytest.fixture(scope="module")
def trained(world: TinyWorld) -> Path:
    """The last checkpoint of the first run."""
    return max((world.run_folders()[0] / "checkpoints").glob("step*.ckpt"))


def test_the_gradient_is_that_of_the_penalty() -> None:
    drafter = tiny_drafter()
    start = {name: weight.detach().clone() for name, weight in drafter.named_parameters()}
    pull = PullToStart(drafter, 0.3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator))
            weight.grad = torch.ones_like(weight)
    pull.add_to_gradients()
    penalty = sum(
        0.3 / 2 * (weight - start[name]).square().sum()
        for name, weight in drafter.named_parameters()
    )
    assert isinstance(penalty, torch.Tensor)
    weights = dict(drafter.named_parameters())
    expected = torch.autograd.grad(penalty, list(weights.values()))
    for (name, weight), gradient in zip(weights.items(), expected, strict=True):
        assert weight.grad is not None
        assert torch.allclose(weight.grad, gradient + 1), name


def test_a_weight_without_gradient_gets_none() -> None:
    drafter = tiny_drafter()
    PullToStart(drafter, 0.3).add_to_gradients()
    assert all(weight.grad is None for weight in drafter.parameters())


def test_the_digest_is_of_the_start() -> None:
    drafter = tiny_drafter(seed=1)
    pull = PullToStart(drafter, 0.3)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.add_(1)
    assert pull.digest == PullToStart(tiny_drafter(seed=1), 0.1).digest
    assert pull.digest != PullToStart(tiny_drafter(seed=2), 0.3).digest


def distance(world: TinyWorld, trained: Path) -> float:
    """Of the newest run's last weights from where it began."""
    start = torch.load(trained, weights_only=True)["state_dict"]
    ended = last_weights(world.run_folders()[-1])
    trained_names = [name for name, weight in ended.items() if weight.is_floating_point()]
    squares = (float((ended[name] - start[name]).square().sum()) for name in trained_names)
    return sum(squares) ** 0.5


def test_a_pulled_run_stays_nearer_and_goes_on_bit_equal(
    world: TinyWorld, trained: Path, tmp_path: Path
) -> None:
    begun = (
        *QUICK,
        "epochs=2",
        "trainer.checkpoint_every_steps=3",
        "trainer.keep_last=9",
        f"paths.init={trained}",
        "paths.vocab_map=null",
    )
    world.run(*begun)
    free = distance(world, trained)
    pulled = (*begun, f"optim.pull_to_start={PULL}")
    world.run(*pulled)
    folder = world.run_folders()[-1]
    assert distance(world, trained) < 0.8 * free
    expected, losses = last_weights(folder), curve(folder, "train/loss")

    middle = folder / "checkpoints" / "step00000006.ckpt"
    done = world.run(*pulled, f"resume={middle}")
    assert "paths.init is what weights are pulled to: the run goes on from" in done.stdout
    assert world.run_folders()[-1] == folder
    assert curve(folder, "train/loss") == losses
    ended = last_weights(folder)
    assert all(torch.equal(ended[name], weight) for name, weight in expected.items())

    changed = torch.load(trained, weights_only=True)
    changed["state_dict"]["drafter.fc.weight"] += 0.01
    torch.save(changed, tmp_path / "other.ckpt")
    other = (*pulled, f"paths.init={tmp_path / 'other.ckpt'}", f"resume={middle}")
    done = world.run(*other, check=False)
    assert done.returncode == 2
    assert "to which the run was pulled before" in done.stderr


def test_a_pull_to_nowhere_is_refused(world: TinyWorld) -> None:
    done = world.run(*QUICK, "optim.pull_to_start=0.1", check=False)
    assert done.returncode == 2
    assert "optim.pull_to_start=0.1 and paths.init is not set" in done.stderr
