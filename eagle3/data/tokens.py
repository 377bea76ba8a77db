"""Documents without their states, for what only looks at token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TokenDocument:
    """Token ids of one document and the gates a loss would use, both of length n."""

    input_ids: Sequence[int]
    loss_mask: Sequence[bool]
