"""What the losses are told, and what they say, of rows of logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

Mix = Sequence[tuple[str, float]]
"""(name of a loss, weight) pairs."""

VerifierLogits = Callable[[Int[Tensor, " C"]], Float[Tensor, "C V"]]
"""Makes the verifier's logits of these rows; the caller may overwrite them."""


@dataclass(frozen=True)
class RowStatistics:
    """Of R rows of draft logits, each against its row of verifier logits."""

    loss: Float[Tensor, " R"]
    """float32; float64 for float64 logits."""
    draft_best: Int[Tensor, " R"]
    """int64, the first id with the largest draft logit."""
    overlap: Float[Tensor, " R"] | None
    """sum_v min(p_v, q_v), as ``loss``; None where nobody asked."""


@dataclass(frozen=True)
class JudgedRows:
    """Rows that one TTT step judges, in increasing order."""

    columns: Int[Tensor, " R"]
    """Place of the row among the A computed rows."""
    targets: Int[Tensor, " R"]
    """Place of its target among ``ChainSteps.verifier_rows``."""


@dataclass(frozen=True)
class ChainSteps:
    """Rows that the steps of a chain judge."""

    rows: tuple[JudgedRows, ...]
    verifier_rows: Int[Tensor, " G"]
    """Rows of the pack whose verifier logits may be needed."""


@dataclass(frozen=True)
class StepStatistics:
    """One TTT step, one value for each of its rows."""

    losses: Float[Tensor, " R"]
    draft_best: Int[Tensor, " R"]
    """Draft id of the drafter's best token."""
    verifier_best: Int[Tensor, " R"]
    """Draft id of the verifier's best token within the draft vocabulary."""
    overlap: Float[Tensor, " R"] | None


@dataclass(frozen=True)
class DraftHead:
    """The drafter's final norm, a function of hidden states [R, H], and its ``lm_head`` [V, H]."""

    norm: Callable[[Tensor], Tensor]
    norm_weight: Float[Tensor, " H"]
    """The trainable gain inside ``norm``."""
    weight: Float[Tensor, "V H"]
