"""Floating point operations of a training step, by part, from sizes; and the peer's.

A product of [n, a] and [a, b] costs ``2 n a b``; backward costs the same again for the gradient of
each factor that has one. Attention costs ``4 D`` a head and visible pair of query and key, and
``10 D`` backward, where the scores are made again (``8 D`` for the reference, which keeps them).
Norms, activations and the divergences are not counted: they are bound by memory, not arithmetic.

With L rows, A computed and G gated ones, R_s judged at step s (see :mod:`eagle3.planning.sizes`)::

    fc               L  once         embedding half   once: k, v: L  q: rows whose token is read;
                                                      or each step, as the hidden half
    hidden half      q: A each step  k, v: L at step 0, A later
    attention        pairs           o_proj, mlp      A  each step
    lm_head          R_s each step, or A                verifier head  G once
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from eagle3.config import ComputeConfig
from eagle3.names import (
    AttentionImpl,
    ComputedRows,
    EmbeddingHalf,
    LossImpl,
    NormPreset,
    Recompute,
)
from eagle3.planning import activations
from eagle3.planning.sizes import Parameters, Step

PEER = ComputeConfig(
    rows=ComputedRows.all,
    embedding_half=EmbeddingHalf.each_step,
    attention=AttentionImpl.merged,
    loss=LossImpl.reference,
)
"""All rows and all parts at every step, the verifier's logits once, attention within documents."""


@dataclass(frozen=True)
class Part:
    """FLOPs of one part."""

    name: str
    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


@dataclass(frozen=True)
class Work:
    """FLOPs of a forward and backward over one pack."""

    parts: tuple[Part, ...]
    rows: int
    """L"""

    @property
    def total(self) -> int:
        return sum(part.total for part in self.parts)

    @property
    def per_row(self) -> float:
        """FLOPs of a packed token."""
        return self.total / self.rows

    def __getitem__(self, name: str) -> Part:
        return next(part for part in self.parts if part.name == name)


def work(step: Step) -> Work:
    """FLOPs by part; products with the frozen full head count where it is used."""
    parts = (
        _fc(step),
        _embedding_half(step),
        _hidden_half(step),
        _attention(step),
        _trained("o_proj", step.ttt_steps * step.computed * Parameters(step.model).output),
        _mlp(step),
        _lm_head(step),
        _verifier_head(step),
    )
    return Work(parts, step.rows)


def peer_work(step: Step) -> Work:
    """The same step as a trainer without these techniques does it, see ``PEER``."""
    return work(replace(step, compute=PEER))


def peer_bytes(step: Step) -> int:
    """What the peer keeps for its backward: activations, keys and values of all steps, loss.

    Counted for its best implementations: attention that makes no mask, but joins keys and values of
    all steps anew at each (s + 1 copies of each at step s), and a fused loss kernel, which keeps
    verifier logits in float32 and draft logits in bfloat16, ``(2 S + 4) L V``.
    """
    theirs, sizes, steps = replace(step, compute=PEER), Parameters(step.model), step.ttt_steps
    kept = sum(activations.kept_by_step(theirs, each) for each in range(steps))
    joined = step.rows * 2 * sizes.key_width * step.product_bytes * sum(range(1, steps))
    loss = (2 * steps + 4) * step.rows * step.model.draft_vocab_size
    return activations.kept_once(theirs) + kept + joined + loss


def _trained(name: str, products: int) -> Part:
    """``products``: multiplications of the forward; input and weight both get a gradient."""
    return Part(name, 2 * products, 4 * products)


def _fc(step: Step) -> Part:
    products = step.rows * Parameters(step.model).fc
    if step.model.norm_layout is not NormPreset.portable:
        return _trained("fc", products)  # gains of the norms before it are trained
    return Part("fc", 2 * products, 2 * products)


def _embedding_half(step: Step) -> Part:
    if step.compute.embedding_half is EmbeddingHalf.each_step:
        return _trained("embedding half", _each_step_half(step))
    sizes = Parameters(step.model)
    widths = step.reached * sizes.query_width + step.rows * 2 * sizes.key_width
    return _trained("embedding half", step.model.hidden_size * widths)


def _hidden_half(step: Step) -> Part:
    return _trained("hidden half", _each_step_half(step))


def _each_step_half(step: Step) -> int:
    """Multiplications of one half of queries, keys and values at all steps."""
    sizes, hidden = Parameters(step.model), step.model.hidden_size
    asked = step.ttt_steps * step.computed * sizes.query_width
    keyed = sum(map(step.keyed, range(step.ttt_steps))) * 2 * sizes.key_width
    return hidden * (asked + keyed)


def _attention(step: Step) -> Part:
    """Own-column pairs too: one of row i at step s for each step before."""
    own = step.computed * sum(range(step.ttt_steps))
    if step.compute.attention is AttentionImpl.merged:
        pairs = step.ttt_steps * causal_pairs(step) + own
    elif step.compute.attention is AttentionImpl.sdpa:
        # Under a dense mask own-column keys of other rows are multiplied too.
        pairs = step.computed * (step.ttt_steps * step.rows + own)
    else:
        pairs = step.ttt_steps * step.computed * step.rows + own
    products = 2 * Parameters(step.model).query_width * pairs
    kept = step.compute.attention is AttentionImpl.reference
    return Part("attention", 2 * products, (4 if kept else 5) * products)


def causal_pairs(step: Step) -> int:
    """Step-0 pairs of one step that the flash operator multiplies, windows not considered.

    On a card all rows of a document ask, with zeros where none is computed.
    """
    every = step.compute.rows is ComputedRows.all or not step.on_cpu
    firsts = [0 if every else d.first_read(step.ttt_steps) for d in step.pack.documents]
    return sum(
        _triangle(document.rows) - _triangle(first)
        for document, first in zip(step.pack.documents, firsts, strict=True)
    )


def _triangle(rows: int) -> int:
    return rows * (rows + 1) // 2


def _mlp(step: Step) -> Part:
    products = step.ttt_steps * step.computed * Parameters(step.model).mlp
    part = _trained("mlp", products)
    if step.compute.recompute is Recompute.none:
        return part
    # The down projection is not made again: nothing of the backward reads its output.
    return replace(part, backward=part.backward + 4 * products // 3)


def _lm_head(step: Step) -> Part:
    judged = sum(step.judged)
    rows = judged if step.compute.loss is LossImpl.deferred else step.ttt_steps * step.computed
    products = rows * Parameters(step.model).lm_head
    return Part("lm_head", 2 * products, (4 if step.model.lm_head_trainable else 2) * products)


def _verifier_head(step: Step) -> Part:
    products = step.verifier_rows * Parameters(step.model).lm_head
    if step.full_verifier_head:
        products += step.pack.gated * step.model.vocab_size * step.model.hidden_size
    return Part("verifier head", 2 * products, 0)
