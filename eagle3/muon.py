"""Muon on hidden matrices and AdamW on every other weight, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class MuonWithAdamW(torch.optim.Optimizer):
    """Torch's own Muon and AdamW behind one ``step`` and one state.

    Lightning counts calls of ``step``, so two optimizers would count every window twice. Groups and
    state are those of the parts themselves, not copies: a rate that is set here is theirs.

    Muon's step cannot be rebuilt from what it keeps, so its size without weight decay is stored in
    the state of each of its weights as ``update_norm`` (scalar).

    Args:
        matrices: weights [out, in] that Muon steps.
        adamw: steps all other weights.
        options: of ``torch.optim.Muon``.
    """

    def __init__(
        self, matrices: Sequence[Tensor], adamw: torch.optim.AdamW, **options: Any
    ) -> None:
        # One Muon a matrix, so that measuring a step copies one matrix at a time.
        self._muons = [torch.optim.Muon([matrix], **options) for matrix in matrices]
        self._adamw = adamw
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    @property
    def _parts(self) -> list[torch.optim.Optimizer]:
        return [*self._muons, self._adamw]

    def _share(self) -> None:
        """Let the parts work on this optimizer's groups and state."""
        first = 0
        for part in self._parts:
            count = len(part.param_groups)
            part.param_groups = self.param_groups[first : first + count]
            part.state = self.state
            first += count

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of every part."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for muon in self._muons:
            self._measured_step(muon)
        self._adamw.step()
        return loss

    def _measured_step(self, muon: torch.optim.Muon) -> None:
        (group,) = muon.param_groups
        (weight,) = group["params"]
        if weight.grad is None:
            return
        decayed = weight * (1 - group["lr"] * group["weight_decay"])
        muon.step()
        self.state[weight]["update_norm"] = torch.linalg.vector_norm(decayed.sub_(weight))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of the same weights; the next step is as if nothing had been saved."""
        super().load_state_dict(state_dict)
        self._share()
