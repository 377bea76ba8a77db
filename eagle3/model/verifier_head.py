"""The frozen verifier head on the draft vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from eagle3.dims import Logits
from eagle3.model.layers import rms_norm
from eagle3.names import LastHidden

_TILE_ROWS = 8192


class VerifierHead(nn.Module):
    """Final norm and the ``lm_head`` rows of the draft vocabulary; buffers only, never saved.

    ``last_hidden`` says whether the stored last state still needs the verifier's final norm.
    """

    norm_weight: Tensor
    weight: Tensor
    full_weight: Tensor | None

    def __init__(
        self,
        norm_weight: Float[Tensor, " H"],
        weight: Float[Tensor, "V H"],
        *,
        eps: float,
        last_hidden: LastHidden,
        full_weight: Float[Tensor, "W H"] | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.last_hidden = last_hidden
        self.register_buffer("norm_weight", norm_weight, persistent=False)
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("full_weight", full_weight, persistent=False)

    @torch.no_grad()
    def forward(self, last_hidden: Float[Tensor, "R H"]) -> Logits:
        """Verifier logits [R, V] over the draft vocabulary."""
        return F.linear(self.features(last_hidden), self.weight)

    def features(self, last_hidden: Float[Tensor, "R H"]) -> Float[Tensor, "R H"]:
        """What the head multiplies: the state after the final norm, in the head's dtype."""
        if self.last_hidden is LastHidden.pre_norm:
            wide = last_hidden.to(torch.promote_types(last_hidden.dtype, torch.float32))
            last_hidden = rms_norm(wide, self.norm_weight, self.eps)
        return last_hidden.to(self.weight.dtype)

    @torch.no_grad()
    def full_argmax(self, last_hidden: Float[Tensor, "R H"]) -> Int[Tensor, " R"] | None:
        """Verifier's best token over its whole vocabulary, in tiles; null without the full head."""
        if self.full_weight is None:
            return None
        features = self.features(last_hidden)
        best = features.new_full((features.shape[0],), -torch.inf)
        token = torch.zeros_like(best, dtype=torch.int64)
        for first in range(0, self.full_weight.shape[0], _TILE_ROWS):
            tile = F.linear(features, self.full_weight[first : first + _TILE_ROWS])
            value, index = tile.max(dim=-1)
            token = torch.where(value > best, index + first, token)
            best = torch.maximum(value, best)
        return token
