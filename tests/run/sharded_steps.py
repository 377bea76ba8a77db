"""A rank of ``test_fsdp.py``: gradients of a sharded drafter beside those of a whole one.

Told its place as every rank is. Rank 0 prints JSON: for each case the largest difference of a
gradient over the largest gradient, and the largest share of a weight that a rank holds.
"""

from __future__ import annotations

import json
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from eagle3.config import ComputeConfig, ModelConfig
from eagle3.data.batch import PackedBatch
from eagle3.model.drafter import Drafter
from eagle3.names import NormPreset, Recompute
from eagle3.objective import row_counts, run_pack, step_weights
from eagle3.sharding import shard, whole
from tests.helpers import TINY, make_document, pack, tiny_drafter, tiny_head

STEPS = 3
PACKS = [
    [pack([make_document(9, 1), make_document(6, 2)]), pack([make_document(7, 3)])],
    [pack([make_document(8, 4, mask=[0] * 8)]), pack([make_document(5, 5), make_document(11, 6)])],
]
"""Two packs of each rank in one optimizer step; the first of the second rank has no loss."""
PLAIN = ComputeConfig.reference()
CASES: dict[str, tuple[ModelConfig, ComputeConfig]] = {
    "fast": (TINY, ComputeConfig()),
    "bfloat16": (TINY, ComputeConfig()),
    "plain": (TINY, PLAIN),
    "recompute": (TINY, ComputeConfig(recompute=Recompute.mlp)),
    "uneven": (replace(TINY, draft_vocab_size=21, intermediate_size=47), ComputeConfig()),
    "frozen_head": (replace(TINY, lm_head_trainable=False), ComputeConfig()),
    "norms_around_fc": (replace(TINY, norm_layout=NormPreset.eagle3_1), ComputeConfig()),
    "norm_before_fc": (replace(TINY, norm_layout=NormPreset.speculators), PLAIN),
}


def backward(
    drafter: Drafter, packs: list[PackedBatch], model: ModelConfig, compute: ComputeConfig,
    world_size: int, *, mixed: bool,
) -> None:  # fmt: skip
    """One optimizer step's gradients, of the rows of all packs of all ranks."""
    counts = row_counts([each for of_rank in PACKS for each in of_rank], STEPS)
    weights = step_weights(counts, step_loss_decay=0.9, world_size=world_size)
    for batch in packs:
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            result = run_pack(
                drafter, tiny_head(model), batch, batch.aux_hidden, ttt_steps=STEPS,
                mix=[("kl", 1.0)], compute=compute, weights=weights,
            )  # fmt: skip
        result.loss.backward()


def judged(drafter: Drafter, batch: PackedBatch, model: ModelConfig) -> list[Tensor]:
    """Losses of a validation."""
    with torch.no_grad():
        steps = run_pack(
            drafter, tiny_head(model), batch, batch.aux_hidden, ttt_steps=STEPS,
            mix=[("kl", 1.0)], compute=ComputeConfig(),
        ).steps  # fmt: skip
    return [step.losses for step in steps]


def compare(
    model: ModelConfig, compute: ComputeConfig, rank: int, *, mixed: bool
) -> dict[str, float]:
    expected, sharded = tiny_drafter(model), tiny_drafter(model)
    for drafter in (expected, sharded):
        drafter.lm_head.weight.requires_grad_(model.lm_head_trainable)
    shard(sharded, init_device_mesh("cpu", (len(PACKS),)))
    shard(sharded, init_device_mesh("cpu", (len(PACKS),)))  # a second time changes nothing
    held = sum(p.to_local().numel() for p in sharded.parameters())
    total = sum(p.numel() for p in expected.parameters())
    # ranks validate packs of their own, and then train
    own, whole_losses = (judged(d, PACKS[rank][1], model) for d in (sharded, expected))
    assert all(torch.equal(a, b) for a, b in zip(own, whole_losses, strict=True))
    backward(expected, [p for packs in PACKS for p in packs], model, compute, 1, mixed=mixed)
    backward(sharded, PACKS[rank], model, compute, len(PACKS), mixed=mixed)
    others = dict(sharded.named_parameters())
    gradients = [(p.grad, others[name].grad) for name, p in expected.named_parameters()]
    assert all((a is None) == (b is None) for a, b in gradients)
    pairs = [(a, whole(b)) for a, b in gradients if a is not None and b is not None]
    norm = whole(torch.nn.utils.get_total_norm([b for _, b in gradients if b is not None]))
    wanted = torch.nn.utils.get_total_norm([a for a, _ in pairs])
    largest = max(float(a.abs().max()) for a, _ in pairs)
    return {
        "gradients": len(pairs),
        "difference": max(float((a - b).abs().max()) for a, b in pairs) / largest,
        "norm_difference": abs(float(norm / wanted) - 1),
        "held": held / total,
    }


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = {name: compare(*case, rank, mixed=name == "bfloat16") for name, case in CASES.items()}
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
