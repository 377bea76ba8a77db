"""What the verifier's final norm and head make of the stored states.

Four questions with one tool, the best token of ``head(norm(state))``: is the last state stored
before or after the norm, did this verifier write the responses, do the aux layers come in the
order of their depth (a logit lens agrees more with the output the deeper it looks), and do states
and verifier belong together at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eagle3.audit import MIN_ROWS, clearly_above
from eagle3.inspection.facts import AgreementFacts
from eagle3.inspection.states import ProbeRows
from eagle3.model.verifier_head import VerifierHead
from eagle3.model.weights import HeadWeights, load_head_weights
from eagle3.names import LastHidden

_CHUNK_ROWS = 512
_UNIT_TOLERANCE = 0.02
"""Of the RMS of a post-norm state over the gain; bfloat16 moves it by less than 0.002."""
_ALL, _NONE = 0.9, 0.1

Finished = Callable[[int], None]


@dataclass(frozen=True)
class _Reader:
    """Norm and head on the device that computes."""

    heads: dict[LastHidden, VerifierHead]
    """For states before and after the norm; they share their tensors."""
    device: torch.device
    finished: Finished

    def best_tokens(self, states: Tensor, read_as: LastHidden) -> Tensor:
        """int64 [R], argmax over the whole vocabulary for ``states`` [R, H]."""
        best = []
        for rows in states.split(_CHUNK_ROWS):
            tokens = self.heads[read_as].full_argmax(rows.to(self.device).float())
            assert tokens is not None
            best.append(tokens.cpu())
            self.finished(len(rows))
        return torch.cat(best)


def passes(num_aux_layers: int) -> int:
    """How often :func:`agreement_facts` applies the head to every row."""
    return num_aux_layers + len(LastHidden)


def agreement_facts(
    verifier: Path,
    probes: Sequence[ProbeRows],
    declared: LastHidden | None,
    device: torch.device,
    finished: Finished,
) -> AgreementFacts:
    """Apply final norm and head to every probed state.

    Logits are computed in float32, ``_CHUNK_ROWS`` rows and a tile of the head at a time.

    Args:
        verifier: directory of the verifier; norm and head are read.
        probes: rows of all sampled documents that have some, at least one.
        declared: what the last state is said to be.
        device: where to compute.
        finished: told the rows of every chunk.

    Raises:
        VerifierError: norm or head is missing or of another shape than ``config.json`` says.
    """
    weights = load_head_weights(verifier, torch.float32)
    states = torch.cat([probe.states for probe in probes])
    next_ids = torch.cat([probe.next_ids for probe in probes])
    reader = _Reader(_heads(weights, device), device, finished)
    last = states[:, -1]
    best = {kind: reader.best_tokens(last, kind) for kind in LastHidden}
    rates = {kind: _rate(best[kind], next_ids) for kind in LastHidden}
    unit_share = _unit_share(last.float(), weights.norm)
    stored_as = _stored_as(rates, unit_share, len(next_ids))
    read_as = stored_as or declared or max(LastHidden, key=lambda kind: rates[kind])
    lens = [
        _rate(reader.best_tokens(states[:, k], LastHidden.pre_norm), best[read_as])
        for k in range(states.shape[1] - 1)
    ]
    return AgreementFacts(
        rows=len(next_ids),
        pre_norm_rate=rates[LastHidden.pre_norm],
        post_norm_rate=rates[LastHidden.post_norm],
        unit_share=unit_share,
        stored_as=None if stored_as is None else str(stored_as),
        read_as=str(read_as),
        on_policy=rates[read_as],
        lens=tuple(lens),
        num_layers=weights.config.num_layers,
    )


def _heads(weights: HeadWeights, device: torch.device) -> dict[LastHidden, VerifierHead]:
    norm, head = weights.norm.to(device), weights.head.to(device)
    eps = weights.config.rms_norm_eps
    return {
        kind: VerifierHead(norm, head, eps=eps, last_hidden=kind, full_weight=head)
        for kind in LastHidden
    }


def _rate(best: Tensor, expected: Tensor) -> float:
    return float((best == expected).double().mean())


def _unit_share(last: Tensor, gain: Tensor) -> float:
    """Share of rows [R, H] whose RMS is 1 after division by ``gain`` [H] (channels of gain 0 left
    out): what an RMSNorm leaves, since it multiplies a vector of RMS 1 by the gain."""
    scaled = last[:, gain != 0] / gain[gain != 0]
    rms = scaled.square().mean(dim=-1).sqrt()
    return float(((rms - 1).abs() < _UNIT_TOLERANCE).double().mean())


def _stored_as(rates: dict[LastHidden, float], unit_share: float, rows: int) -> LastHidden | None:
    """What the last state is, by size and by argmax; None when they contradict or do not tell."""
    by_size = by_rate = None
    if unit_share > _ALL:
        by_size = LastHidden.post_norm
    elif unit_share < _NONE:
        by_size = LastHidden.pre_norm
    better, worse = sorted(LastHidden, key=lambda kind: -rates[kind])
    if rows >= MIN_ROWS and clearly_above(rates[better], rates[worse], rows):
        by_rate = better
    if by_size and by_rate and by_size is not by_rate:
        return None
    return by_size or by_rate
