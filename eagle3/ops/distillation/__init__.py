"""Distillation losses and acceptance statistics, one value a row.

====================  =============================================================
name                  loss of a row (p verifier, q drafter)
====================  =============================================================
``kl``                sum p (log p - log q), forward KL, the default of the trainer
``reverse_kl``        sum q (log q - log p)
``js``                Jensen-Shannon divergence
``ce``                -log q[argmax p]
``tv``                sum |p - q| / 2
``nla``               -log sum min(p, q)
``lk_hybrid``         KL early, TV late (arXiv 2602.23881)
====================  =============================================================
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eagle3.dims import Logits, RowLoss
from eagle3.errors import ConfigError
from eagle3.ops.distillation import reference

LOSSES: tuple[str, ...] = tuple(reference.DIVERGENCES)
IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {"reference": reference.mixed_loss}


def distillation_loss(
    draft_logits: Logits,
    verifier_logits: Logits,
    mix: Sequence[tuple[str, float]],
    *,
    implementation: str = "reference",
) -> RowLoss:
    """Loss of each row, a weighted sum of named divergences; float32, or float64 for float64.

    Gradients go to the draft logits only. R = 0 gives an empty tensor with a graph.

    Args:
        draft_logits: drafter's logits over the draft vocabulary.
        verifier_logits: verifier's logits over the same ids; -inf excludes an id.
        mix: (name of ``LOSSES``, weight) pairs.
        implementation: a key of ``IMPLEMENTATIONS``.

    Raises:
        ConfigError: unknown loss or implementation, or weights that :func:`check_mix` refuses.
    """
    check_mix(mix)
    if implementation not in IMPLEMENTATIONS:
        raise ConfigError(
            f"unknown implementation {str(implementation)!r} of the distillation loss; "
            f"expected one of {', '.join(IMPLEMENTATIONS)}"
        )
    return IMPLEMENTATIONS[implementation](draft_logits, verifier_logits, mix)


def check_mix(mix: Sequence[tuple[str, float]]) -> None:
    """Refuse unknown names, negative or non-finite weights, and a mix that weighs nothing.

    Raises:
        ConfigError: names the entry of ``loss.mix``, and the nearest loss of an unknown name.
    """
    for index, (name, weight) in enumerate(mix):
        if name not in LOSSES:
            near = difflib.get_close_matches(name, LOSSES, n=1, cutoff=0)[0]
            raise ConfigError(
                f"loss.mix[{index}].name: unknown loss {name!r}; did you mean {near!r}? "
                f"Losses: {', '.join(LOSSES)}"
            )
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(
                f"loss.mix[{index}].weight: found {weight} for {name!r}, "
                "expected a finite number that is not negative"
            )
    if not any(weight > 0 for _, weight in mix):
        raise ConfigError(
            "loss.mix: found no term with a weight above 0, expected at least one, "
            "such as [{name: kl, weight: 1.0}]"
        )


@torch.no_grad()
def overlap(draft_logits: Logits, verifier_logits: Logits) -> RowLoss:
    """sum_v min(p_v, q_v) of each row, float32 at least: the acceptance rate of sampled drafts."""
    return reference.Distributions(draft_logits, verifier_logits).overlap
