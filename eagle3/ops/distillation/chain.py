"""The loss of a whole TTT chain: all steps of a pack, judged together after the unroll.

No step needs the logits of an earlier one (the chain reads true tokens), so the loss can wait until
all hidden states are there::

    target row t             0   1   2   3   4   5   6   7      one row of verifier logits each
    read at step 0 by row    0   1   2   3   4   5   6   7
    read at step 1 by row        0   1   2   3   4   5   6
    read at step 2 by row            0   1   2   3   4   5
                                     '---chunk---'

``deferred`` goes through chunks of target rows: verifier logits once, the rows of all steps through
one product with ``lm_head``, then loss, statistics and gradient in place, and both products of the
backward pass while the chunk's logits are at hand. Nothing of size rows x V outlives its chunk.
``reference`` is what it must equal: the logits of every row at once, differentiated by autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from eagle3.errors import ConfigError
from eagle3.ops.distillation import deferred
from eagle3.ops.distillation.mix import check_mix
from eagle3.ops.distillation.reference import Distributions, mixed_loss
from eagle3.ops.distillation.rows import ChainSteps, DraftHead, Mix, StepStatistics, VerifierLogits


@dataclass(frozen=True)
class ChainLoss:
    """What a chain is worth."""

    loss: Float[Tensor, ""]
    """Sum over steps of weight x summed row losses, with a graph; 0 without weights."""
    steps: list[StepStatistics]


def chain_loss(
    hidden: Sequence[Float[Tensor, "A H"]],
    steps: ChainSteps,
    draft_head: DraftHead,
    verifier_logits: VerifierLogits,
    mix: Mix,
    *,
    weights: Float[Tensor, " S"] | None,
    with_overlap: bool = False,
    implementation: str,
) -> ChainLoss:
    """Judge the rows of all steps.

    Gradients go to ``hidden`` and the draft head only. Steps without rows, and A = 0, give exact
    zeros with a graph. Under autocast products are made in its dtype, sums in float32.

    Args:
        hidden: the layer's output at each TTT step, before the final norm.
        steps: which rows each step judges.
        draft_head: final norm and ``lm_head`` of the drafter.
        verifier_logits: makes the verifier's logits of some target rows.
        mix: (name of a loss, weight) pairs, see :mod:`eagle3.ops.distillation`.
        weights: factor of each step's summed row losses; None: statistics only.
        with_overlap: also sum_v min(p_v, q_v) of every row.
        implementation: a key of ``IMPLEMENTATIONS``.

    Raises:
        ConfigError: unknown implementation, or a mix that :func:`check_mix` refuses.
    """
    check_mix(mix)
    if implementation not in IMPLEMENTATIONS:
        raise ConfigError(
            f"compute.loss: unknown implementation {str(implementation)!r}; "
            f"expected one of {', '.join(IMPLEMENTATIONS)}"
        )
    run = IMPLEMENTATIONS[implementation]
    loss, found = run(hidden, steps, draft_head, verifier_logits, mix, weights, with_overlap)
    return ChainLoss(loss, found)


def reference(
    hidden: Sequence[Tensor],
    steps: ChainSteps,
    draft_head: DraftHead,
    verifier_logits: VerifierLogits,
    mix: Mix,
    weights: Tensor | None,
    with_overlap: bool,
) -> tuple[Tensor, list[StepStatistics]]:
    """Logits of all computed rows and of all target rows at once."""
    verifier_GV = verifier_logits(steps.verifier_rows)
    best_G = verifier_GV.argmax(-1)
    found = []
    total = hidden[0].new_zeros((), dtype=torch.promote_types(hidden[0].dtype, torch.float32))
    for step, hidden_AH in enumerate(hidden):
        rows = steps.rows[step]
        draft_RV = F.linear(draft_head.norm(hidden_AH), draft_head.weight)[rows.columns]
        targets_RV = verifier_GV[rows.targets]
        losses = mixed_loss(draft_RV, targets_RV, mix)
        overlap = Distributions(draft_RV.detach(), targets_RV).overlap if with_overlap else None
        found.append(
            StepStatistics(losses.detach(), draft_RV.argmax(-1), best_G[rows.targets], overlap)
        )
        if weights is not None:
            total = total + weights[step].to(total.dtype) * losses.sum()
    return total, found


IMPLEMENTATIONS: dict[str, Callable[..., tuple[Tensor, list[StepStatistics]]]] = {
    "reference": reference,
    "deferred": deferred.chain,
}
