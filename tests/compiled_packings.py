"""Trains a plain and a compiled drafter on random packings; prints what differs as JSON.

A process of its own (``python -m tests.compiled_packings``): the run-time checks of shapes that
tests put around the model's functions cannot be compiled.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eagle3.compilation import compile_layer, compiled_graphs
from eagle3.config import ComputeConfig, OptimConfig
from eagle3.data.batch import PackedBatch
from eagle3.model.drafter import Drafter
from eagle3.model.verifier_head import VerifierHead
from eagle3.names import Arch, ComputedRows, EmbeddingHalf, Recompute
from eagle3.optim import build_optimizer
from tests.helpers import TINY, judge, make_document, pack, tiny_drafter, tiny_head

PACKINGS = 20
CASES = {
    "default": (TINY, ComputeConfig()),
    "qwen3, recomputed, all rows": (
        replace(TINY, arch=Arch.qwen3),
        ComputeConfig(
            rows=ComputedRows.all,
            embedding_half=EmbeddingHalf.each_step,
            recompute=Recompute.mlp,
        ),
    ),
}


def random_packs(seed: int) -> list[PackedBatch]:
    """Packs of one to five documents of 3 to 20 tokens; the second one computes a single row."""
    rng = random.Random(seed)
    packs = [
        pack([make_document(rng.randint(3, 20), rng.randint(0, 99)) for _ in range(count)])
        for count in (rng.randint(1, 5) for _ in range(PACKINGS))
    ]
    packs[1] = pack([make_document(3, 7, mask=[0, 0, 1])])
    return packs


class Training:
    """One drafter and its optimizer."""

    def __init__(self, drafter: Drafter, head: VerifierHead, compute: ComputeConfig) -> None:
        self.drafter, self._head, self._compute = drafter, head, compute
        self._optimizer = build_optimizer(drafter, OptimConfig(), 1e-2)

    def step(self, batch: PackedBatch) -> tuple[float, list[Tensor]]:
        """The loss and the gradients of this pack, before it was trained on."""
        self._optimizer.zero_grad()
        loss = judge(self.drafter, self._head, batch, ttt_steps=3, compute=self._compute).loss
        loss.backward()
        gradients = [p.grad.clone() for p in self.drafter.parameters() if p.grad is not None]
        self._optimizer.step()
        return float(loss.detach()), gradients


def compare(name: str) -> dict[str, Any]:
    """Graphs after each packing, losses of both, the largest difference of a gradient."""
    config, compute = CASES[name]
    plain, compiled = (Training(tiny_drafter(config), tiny_head(), compute) for _ in range(2))
    names = list(compiled.drafter.state_dict())
    compile_layer(compiled.drafter.layer)
    before, graphs, losses, differences = compiled_graphs(), [], [], []
    for batch in random_packs(seed=3):
        loss, gradients = plain.step(batch)
        other, others = compiled.step(batch)
        graphs.append(compiled_graphs() - before)
        losses.append((loss, other))
        pairs = zip(gradients, others, strict=True)
        differences.append(max(float((a - b).abs().max()) for a, b in pairs))
    with torch.no_grad():
        judge(compiled.drafter, tiny_head(), batch, ttt_steps=3, compute=compute)
    return {
        "graphs": graphs,
        "graphs_after_validation": compiled_graphs() - before,
        "losses": losses,
        "gradients": differences,
        "same_names": names == list(compiled.drafter.state_dict()),
    }


if __name__ == "__main__":
    print(json.dumps({name: compare(name) for name in CASES}))
