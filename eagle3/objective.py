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

from eagle3.config import ComputeConfig
from eagle3.data.batch import PackedBatch
from eagle3.dims import AuxHidden
from eagle3.model.drafter import Drafter
from eagle3.model.ttt import StepRows, read_rows, step_rows, unroll
from eagle3.model.verifier_head import VerifierHead
from eagle3.names import ComputedRows
from eagle3.ops.distillation import chain_loss
from eagle3.ops.distillation.rows import ChainSteps, DraftHead, JudgedRows, StepStatistics


@dataclass(frozen=True)
class StepResult:
    """One TTT step of one pack."""

    rows: StepRows
    losses: Float[Tensor, " R"]
    """Without graph; the loss to differentiate is that of the pack."""
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


@dataclass(frozen=True)
class PackResult:
    """A pack's share of the window's loss, and its judged rows."""

    loss: Float[Tensor, ""]
    """Exact zero, with a graph, where no row has a loss."""
    steps: list[StepResult]


def row_counts(packs: Sequence[PackedBatch], ttt_steps: int) -> Int[Tensor, " S"]:
    """Rows present at each TTT step over these (trimmed) packs."""
    counts = [
        sum(step_rows(pack, step).starts.numel() for pack in packs) for step in range(ttt_steps)
    ]
    return torch.tensor(counts, dtype=torch.int64)


def step_weights(
    global_counts: Int[Tensor, " S"], *, step_loss_decay: float, world_size: int
) -> Float[Tensor, " S"]:
    """Factor of each step's summed row losses in this rank's share of the window's loss, float64.

    Args:
        global_counts: rows of each step over all ranks and packs of the window.
    """
    steps = torch.arange(len(global_counts), device=global_counts.device, dtype=torch.float64)
    return step_loss_decay**steps * world_size / global_counts.clamp(min=1)


def run_pack(
    drafter: Drafter,
    head: VerifierHead,
    batch: PackedBatch,
    aux_hidden: AuxHidden,
    *,
    ttt_steps: int,
    mix: Sequence[tuple[str, float]],
    compute: ComputeConfig,
    weights: Float[Tensor, " S"] | None = None,
    with_overlap: bool = False,
) -> PackResult:
    """Unroll one trimmed pack and judge every row that a loss reads.

    Args:
        weights: :func:`step_weights` of the window; None: no loss, for validation.
        with_overlap: also the acceptance rate of sampled drafts.
    """
    rows = read_rows(batch, ttt_steps) if compute.rows == ComputedRows.read else None
    judged = [step_rows(batch, step) for step in range(ttt_steps)]

    def judge(hidden: list[Tensor]) -> tuple[Tensor, list[StepStatistics]]:
        chain = chain_loss(
            hidden,
            _chain_steps(batch, judged, rows, compute),
            DraftHead(drafter.norm, drafter.norm.weight, drafter.lm_head.weight),
            lambda rows: head(batch.last_hidden[rows]),
            mix,
            weights=weights,
            with_overlap=with_overlap,
            implementation=compute.loss,
        )
        return chain.loss, chain.steps

    def unroll_and_judge() -> tuple[Tensor, list[StepStatistics]]:
        hidden = drafter.layer.within(
            lambda: list(unroll(drafter, batch, aux_hidden, ttt_steps, compute, rows))
        )
        return drafter.lm_head.within(judge, hidden)

    loss, found = drafter.within(unroll_and_judge)
    gated = batch.loss_mask.nonzero()[:, 0]
    covered = torch.zeros(len(batch), dtype=torch.bool, device=gated.device)
    covered[gated] = covered_rows(batch, gated, drafter.t2d, head)
    steps = [
        StepResult(rows=rows, covered=covered[rows.targets], **vars(step))
        for rows, step in zip(judged, found, strict=True)
    ]
    return PackResult(loss, steps)


def _chain_steps(
    batch: PackedBatch,
    judged: Sequence[StepRows],
    rows: Int[Tensor, " A"] | None,
    compute: ComputeConfig,
) -> ChainSteps:
    """Places of the judged rows among the computed rows, and of their targets among the gated."""
    device = batch.input_ids.device
    everything = torch.arange(len(batch), device=device)
    gated = everything if compute.rows == ComputedRows.all else batch.loss_mask.nonzero()[:, 0]
    column, place = torch.empty_like(everything), torch.empty_like(everything)
    computed = everything if rows is None else rows
    column[computed] = torch.arange(len(computed), device=device)
    place[gated] = torch.arange(len(gated), device=device)
    return ChainSteps(
        tuple(JudgedRows(column[step.starts], place[step.targets]) for step in judged), gated
    )


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
