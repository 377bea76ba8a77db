"""Cheap looks at the data before training: norm of the last state, on-policy share, noise size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.data.batch import PackedBatch
from eagle3.data.vocab import VocabMap
from eagle3.errors import DataError
from eagle3.model.verifier_head import VerifierHead
from eagle3.names import LastHidden

MIN_ROWS = 50
_CLEARLY = 0.05
_ON_POLICY = 0.6


@dataclass(frozen=True)
class NormProbe:
    """How often the verifier's argmax is the data's next token, read both ways."""

    rows: int
    declared: LastHidden
    declared_rate: float
    other_rate: float

    def lines(self) -> list[str]:
        """What a person should read, with a warning where it is due."""
        if self.rows < MIN_ROWS:
            return [f"probe: only {self.rows} rows to judge the last state by; norm not checked"]
        out = [
            f"probe: verifier argmax = next token on {self.declared_rate:.1%} of {self.rows} rows "
            f"(read as {self.declared}; {self.other_rate:.1%} the other way)"
        ]
        if self.declared_rate < _ON_POLICY:
            out.append(
                "warning: most tokens are not what this verifier would say (sampled, or another "
                "model's answers): expect lower acceptance; regenerate the responses if you can"
            )
        return out

    def check(self) -> None:
        """Stop when the declared kind of last state is clearly the worse reading."""
        if self.rows < MIN_ROWS or not clearly_above(
            self.other_rate, self.declared_rate, self.rows
        ):
            return
        other = _other(self.declared)
        raise DataError(
            f"the last hidden state is declared {self.declared}, but the verifier's argmax matches "
            f"the data's next token on {self.declared_rate:.1%} of {self.rows} rows so read and on "
            f"{self.other_rate:.1%} as {other}: set data.last_hidden={other} (or check that "
            "paths.verifier is the model the states come from)"
        )


def clearly_above(higher: float, lower: float, rows: int) -> bool:
    """Whether one rate over ``rows`` rows is above another by more than chance."""
    noise = 3 * (0.25 / max(rows, 1)) ** 0.5
    return higher - lower >= max(_CLEARLY, noise)


@torch.no_grad()
def probe_last_hidden(head: VerifierHead, batch: PackedBatch, vocab: VocabMap) -> NormProbe:
    """Compare argmax with the next token on supervised rows whose token the draft head can say."""
    gated = batch.loss_mask & (batch.next_ids >= 0)
    rows = gated & vocab.t2d[batch.next_ids.clamp(min=0)]
    states, tokens = batch.last_hidden[rows], batch.next_ids[rows]
    other = VerifierHead(
        head.norm_weight, head.weight, eps=head.eps, last_hidden=_other(head.last_hidden)
    )

    def rate(reading: VerifierHead) -> float:
        if not len(tokens):
            return 0.0
        best = vocab.to_verifier(reading(states).argmax(-1))
        return float((best == tokens).double().mean())

    return NormProbe(len(tokens), head.last_hidden, rate(head), rate(other))


def aux_rms(batch: PackedBatch, num_aux_layers: int) -> list[float]:
    """Median over rows of the root mean square of each aux layer's state.

    The median, since the first token of a document is often a hundred times larger.
    """
    parts = batch.aux_hidden.float().chunk(num_aux_layers, dim=-1)
    return [float(_row_rms(part).median()) for part in parts]


def noise_line(batch: PackedBatch, num_aux_layers: int, noise_std: float) -> str:
    """``noise: std 0.05 = 1.2 %, 0.7 %, 0.2 % of the aux states' RMS (4.2, 7.1, 26.8)``."""
    sizes = aux_rms(batch, num_aux_layers)
    shares = ", ".join(f"{noise_std / max(size, 1e-9):.2%}" for size in sizes)
    return f"noise: std {noise_std:g} = {shares} of the aux states' RMS " + (
        f"({', '.join(f'{size:.3g}' for size in sizes)}, low layer first)"
    )


def _row_rms(states: Tensor) -> Tensor:
    return states.square().mean(-1).sqrt()


def _other(kind: LastHidden) -> LastHidden:
    return LastHidden.post_norm if kind is LastHidden.pre_norm else LastHidden.pre_norm
