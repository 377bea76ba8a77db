"""One document in memory."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """All token ids and gates of a document, and the states of a range of its tokens."""

    input_ids: Int[Tensor, " N"]
    """int64, the whole document, n tokens."""
    loss_mask: Bool[Tensor, " N"]
    """bool, the whole document."""
    aux_hidden: Tensor
    """[m, K*H], low layer first; m tokens from the range's start."""
    last_hidden: Tensor
    """[m, H]"""

    def __len__(self) -> int:
        return self.input_ids.shape[0]
