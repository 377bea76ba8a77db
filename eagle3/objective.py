"""From unrolled hidden states to one loss: per row, masked, decayed, globally normalised.

::

    loss = sum_s decay^s * (sum of row losses at step s, all ranks and packs of the window)
                           / (count of valid rows at step s, over the same)

The counts are all-reduced before the first backward. DDP averages gradients over ranks, so the
local share carries a factor ``world_size``: one rank with ten rows equals two with one and nine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle3.data.batch import PackedBatch
from eagle3.dims import AuxHidden
from eagle3.model.drafter import Drafter
from eagle3.model.ttt import StepRows, step_rows, unroll
from eagle3.model.verifier_head import VerifierHead
from eagle3.ops.distillation import distillation_loss, overlap


@dataclass(frozen=True)
class StepResult:
    """One TTT step of one pack."""

    rows: StepRows
    losses: Float[Tensor, " R"]
    draft_best: Int[Tensor, " R"]
    """Draft id of the drafter's best token."""
    verifier_best: Int[Tensor, " R"]
    """Draft id of the verifier's best token within the draft vocabulary."""
    covered: Bool[Tensor, " R"]
    """The verifier's true token lies in the draft vocabulary."""
    overlap: Float[Tensor, " R"] | None
    """sum_v min(p_v, q_v); measured in validation only, since it costs two softmaxes a row."""

    @property
    def correct(self) -> Bool[Tensor, " R"]:
        """Top-1 agreement; a row whose true token the drafter cannot say counts as wrong."""
        return (self.draft_best == self.verifier_best) & self.covered


def row_counts(packs: Sequence[PackedBatch], ttt_steps: int) -> Int[Tensor, " S"]:
    """Rows present at each TTT step over these (trimmed) packs."""
    counts = [
        sum(step_rows(pack, step).starts.numel() for pack in packs) for step in range(ttt_steps)
    ]
    return torch.tensor(counts, dtype=torch.int64)


def run_pack(
    drafter: Drafter,
    head: VerifierHead,
    batch: PackedBatch,
    aux_hidden: AuxHidden,
    *,
    ttt_steps: int,
    mix: Sequence[tuple[str, float]],
    with_overlap: bool = False,
) -> list[StepResult]:
    """Unroll one trimmed pack and judge every row that a loss reads.

    Verifier logits are made once per gated row and shared by the steps; draft logits only for the
    rows of :func:`eagle3.model.ttt.step_rows`.
    """
    gated = batch.loss_mask.nonzero()[:, 0]
    place = torch.zeros(len(batch), dtype=torch.int64, device=gated.device)
    place[gated] = torch.arange(gated.numel(), device=gated.device)
    verifier_GV = head(batch.last_hidden[gated])
    best_G = verifier_GV.argmax(-1)
    covered_G = covered_rows(batch, gated, drafter.t2d, head)
    results = []
    for step, hidden_TH in enumerate(unroll(drafter, batch, aux_hidden, ttt_steps)):
        rows = step_rows(batch, step)
        draft_RV = drafter.logits(hidden_TH[rows.starts])
        targets = place[rows.targets]
        verifier_RV = verifier_GV[targets]
        results.append(
            StepResult(
                rows=rows,
                losses=distillation_loss(draft_RV, verifier_RV, mix),
                draft_best=draft_RV.detach().argmax(-1),
                verifier_best=best_G[targets],
                covered=covered_G[targets],
                overlap=overlap(draft_RV, verifier_RV) if with_overlap else None,
            )
        )
    return results


def covered_rows(
    batch: PackedBatch, gated: Int[Tensor, " G"], t2d: Bool[Tensor, " W"], head: VerifierHead
) -> Bool[Tensor, " G"]:
    """Gated rows whose true verifier token is in the draft vocabulary.

    Exact with the verifier's full head. Without it the data's own next token decides, which is the
    verifier's token on greedy on-policy data; where that token is missing or starts the next
    prompt it says nothing, and the row counts as covered.
    """
    tokens = head.full_argmax(batch.last_hidden[gated])
    if tokens is not None:
        return t2d[tokens]
    tokens = batch.next_ids[gated]
    following = (gated + 1).clamp(max=len(batch) - 1)
    ends_turn = (batch.document_ids[following] == batch.document_ids[gated]) & ~batch.loss_mask[
        following
    ]
    return t2d[tokens.clamp(min=0)] | (tokens < 0) | ends_turn


def window_loss(
    results: Sequence[StepResult],
    global_counts: Int[Tensor, " S"],
    *,
    step_loss_decay: float,
    world_size: int,
) -> Float[Tensor, ""]:
    """This pack's share of the window's loss; exact zero, with a graph, when it has no rows."""
    total = torch.zeros((), device=global_counts.device)
    for step, result in enumerate(results):
        weight = step_loss_decay**step * world_size
        total = total + weight * result.losses.sum() / global_counts[step].clamp(min=1)
    return total
