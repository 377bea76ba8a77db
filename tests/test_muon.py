"""Muon beside AdamW: which weight goes where, torch's own steps, and a resume to the bit."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eagle3.config import ModelConfig, OptimConfig
from eagle3.model.drafter import Drafter
from eagle3.model.layers import NormLayout
from eagle3.muon import MuonWithAdamW
from eagle3.names import OptimizerName
from eagle3.optim import build_optimizer, update_ratio
from tests.helpers import TINY, judge, make_document, pack, tiny_drafter, tiny_head
from tests.tiny_run import curve, make_world, some_documents

MUON = OptimConfig(optimizer=OptimizerName.muon, weight_decay=0.1)
MATRICES = {
    "fc.weight",
    *(f"layer.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"layer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
}


def loss_of(drafter: Drafter, step: int) -> Tensor:
    """The loss on the pack of this step."""
    batch = pack([make_document(12, step), make_document(9, step + 100)])
    return judge(drafter, tiny_head(), batch, ttt_steps=2).loss


def train(drafter: Drafter, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> list[float]:
    """Losses of these steps."""
    losses = []
    for step in steps:
        loss = loss_of(drafter, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def weights(drafter: Drafter) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in drafter.named_parameters()}


@pytest.mark.parametrize("config", [TINY, ModelConfig(lm_head_trainable=False)])
def test_muon_takes_the_matrices_of_fc_and_the_layer(config: ModelConfig) -> None:
    drafter = Drafter(config, NormLayout(fc_norm=True))
    optimizer = build_optimizer(drafter, MUON, 1e-3)
    names = {id(p): name for name, p in drafter.named_parameters()}
    groups = [({names[id(p)] for p in g["params"]}, g) for g in optimizer.param_groups]
    muon = {name for found, group in groups if "momentum" in group for name in found}
    adamw = {name for found, group in groups if "betas" in group for name in found}
    trainable = {name for name, p in drafter.named_parameters() if p.requires_grad}
    assert muon == MATRICES
    assert adamw == trainable - MATRICES
    assert sum(len(found) for found, _ in groups) == len(trainable)
    for found, group in groups:
        assert {group["weight_decay"]} == {0.0 if "norm" in name else 0.1 for name in found}


def test_a_step_is_that_of_torchs_own_optimizers() -> None:
    ours, theirs = tiny_drafter(), tiny_drafter()
    optimizer = build_optimizer(ours, MUON, 1e-3)
    named = dict(theirs.named_parameters())
    muon = torch.optim.Muon(
        [named[name] for name in sorted(MATRICES)],
        lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    adamw = torch.optim.AdamW(
        [
            {"params": [named["lm_head.weight"]], "weight_decay": 0.1},
            {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=1e-3, fused=True,
    )  # fmt: skip
    train(ours, optimizer, range(4))
    for step in range(4):
        theirs.zero_grad()
        loss_of(theirs, step).backward()
        muon.step()
        adamw.step()
    for name, weight in weights(ours).items():
        assert torch.equal(weight, named[name]), name


def test_muon_moves_weights_as_far_as_the_same_rate_of_adamw() -> None:
    """Root mean square of an update over the rate: 0.2, less what Newton-Schulz leaves undone."""
    drafter = tiny_drafter()
    optimizer = build_optimizer(drafter, MUON, 1e-3)
    train(drafter, optimizer, range(3))
    for name in MATRICES:
        weight = drafter.get_parameter(name)
        rms = float(optimizer.state[weight]["update_norm"]) / weight.numel() ** 0.5
        assert 0.1 < rms / 1e-3 < 0.25, name


def test_update_ratio_is_what_the_step_did() -> None:
    drafter = tiny_drafter()
    optimizer = build_optimizer(drafter, MUON, 1e-2)
    train(drafter, optimizer, range(2))
    before = weights(drafter)
    train(drafter, optimizer, range(2, 3))
    for part in ("fc", "layer", "lm_head"):
        names = [name for name in before if name.startswith(f"{part}.")]
        moved, sizes = [], []
        for name in names:
            weight = drafter.get_parameter(name).detach()
            decay = 0.0 if "norm" in name else 1e-2 * 0.1
            moved.append((weight - (1 - decay) * before[name]).norm())
            sizes.append(weight.norm())
        wanted = float(torch.stack(moved).norm() / torch.stack(sizes).norm())
        found = update_ratio(optimizer, drafter.get_submodule(part).parameters())
        assert float(found) == pytest.approx(wanted, rel=1e-3), part


def test_a_saved_state_goes_on_to_the_bit() -> None:
    whole = tiny_drafter()
    losses = train(whole, build_optimizer(whole, MUON, 1e-2), range(8))
    drafter = tiny_drafter()
    optimizer = build_optimizer(drafter, MUON, 1e-2)
    assert train(drafter, optimizer, range(4)) == losses[:4]
    file = io.BytesIO()
    torch.save([drafter.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    saved_weights, saved_state = torch.load(file, weights_only=True)

    resumed = tiny_drafter(seed=9)
    resumed.load_state_dict(saved_weights)
    resumed.embed_tokens = drafter.embed_tokens
    fresh = build_optimizer(resumed, MUON, 1.0)
    fresh.load_state_dict(saved_state)
    assert isinstance(fresh, MuonWithAdamW)
    assert all(group["lr"] == 1e-2 for group in fresh.param_groups)
    assert train(resumed, fresh, range(4, 8)) == losses[4:]
    for name, weight in weights(whole).items():
        assert torch.equal(weight, resumed.get_parameter(name)), name


def test_a_rate_set_after_loading_is_the_rate_of_the_step() -> None:
    drafter = tiny_drafter()
    optimizer = build_optimizer(drafter, MUON, 1e-2)
    train(drafter, optimizer, range(1))
    optimizer.load_state_dict(optimizer.state_dict())
    before = weights(drafter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(drafter, optimizer, range(1, 2))
    assert all(torch.equal(weight, before[name]) for name, weight in weights(drafter).items())


@pytest.mark.parametrize("name", list(OptimizerName))
def test_a_few_documents_are_learned(name: OptimizerName) -> None:
    drafter = tiny_drafter()
    optimizer = build_optimizer(drafter, OptimConfig(optimizer=name), 2e-2)
    losses = train(drafter, optimizer, [1] * 40)
    assert losses[-1] < 0.3 * losses[0]


def test_a_run_with_muon_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    world = make_world(tmp_path, some_documents(12))
    saves = ("trainer.checkpoint_every_steps=8", "trainer.keep_last=9")
    run = ("max_seq_len=16", "epochs=2", "optim=muon", *saves)
    world.run(*run, "optim.schedule=constant")
    (folder,) = world.run_folders()
    checkpoint = folder / "checkpoints" / "step00000008.ckpt"
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 8
    whole = curve(folder, "train/loss")
    assert len(whole) > 8, "some steps are left"
    world.run(*run, "optim.schedule=constant", f"resume={checkpoint}")
    assert world.run_folders() == [folder]
    assert curve(folder, "train/loss") == whole

    refused = world.run(*run, "optim=adamw", f"resume={checkpoint}", check=False)
    assert refused.returncode == 2
    assert "optim.optimizer=adamw: expected muon" in refused.stderr
    assert "Traceback" not in refused.stderr
