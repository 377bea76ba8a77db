"""Peaks of a training step: what lives at the same time, phase by phase.

::

    unroll ──► loss ──► loss backward ──► backward of step S-1 .. 0 ──► end
               chunks    (reference)       activations go,                all gradients are there
                                           gradients of weights come

Bytes over weights, optimizer states and packs. Gradients of a weight used at several steps are
summed in the dtype of products, and cast at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from eagle3.names import AttentionImpl, EmbeddingHalf, LossImpl, Recompute
from eagle3.planning import activations
from eagle3.planning.activations import FLOAT32
from eagle3.planning.sizes import Parameters, Step

CHUNK_BYTES = {True: 16 << 20, False: 256 << 20}
"""Draft logits of a chunk of the deferred loss, by whether it runs on CPU."""
_BLOCK_BYTES, _BLOCKS = 1 << 20, 11
"""Temporaries of the closed-form row losses on CPU; a kernel on a card has none."""


@dataclass(frozen=True)
class Phase:
    """Bytes alive at the peak of a part of the step."""

    name: str
    activations: int
    """Kept for backward, and weights in the dtype of products."""
    gradients: int
    loss: int
    """What the loss keeps beside its gradients."""
    temporaries: int

    @property
    def total(self) -> int:
        return self.activations + self.gradients + self.loss + self.temporaries


def phases(step: Step, *, in_buckets: bool = False) -> list[Phase]:
    """In the order of time, for the first pack of an optimizer step.

    Args:
        in_buckets: gradients end in the buckets that ranks exchange, which are counted elsewhere.
    """
    end = _end(step)
    if in_buckets:
        end = replace(end, gradients=end.gradients - Parameters(step.model).trained * FLOAT32)
    return [*_until_end(step), end]


def later_phases(step: Step) -> list[Phase]:
    """The same for its other packs, which find the gradients of all weights and add to them."""
    sizes = Parameters(step.model)
    held = sizes.trained * FLOAT32
    joining = sizes.query_key_value * step.product_bytes + sizes.query * FLOAT32
    end = replace(_end(step), gradients=joining)
    return [replace(phase, gradients=phase.gradients + held) for phase in (*_until_end(step), end)]


def _until_end(step: Step) -> list[Phase]:
    return [_unroll(step), *_loss(step), *_backward(step)]


def kept_bytes(step: Step) -> int:
    """What the step keeps for its backward, and the loss needs at once, weights left out."""
    kept = _activations(step, step.ttt_steps - 1) - activations.cast_weights(step)
    if step.compute.loss is LossImpl.reference:
        return kept + kept_by_reference_loss(step)
    hidden = _loss_gradients(step) - _head_gradient(step)
    return kept + hidden + _chunk_logits(step)


def _activations(step: Step, last_step: int) -> int:
    """Kept for the backward of TTT steps 0..last_step."""
    kept = sum(activations.kept_by_step(step, each) for each in range(last_step + 1))
    return kept + activations.kept_once(step) + activations.cast_weights(step)


def _embedded(step: Step) -> int:
    """Queries, keys and values of the embedding half, or their gradients."""
    if step.compute.embedding_half is EmbeddingHalf.each_step:
        return 0
    sizes = Parameters(step.model)
    values = step.reached * sizes.query_width + step.rows * 2 * sizes.key_width
    return values * step.product_bytes


def _unroll(step: Step) -> Phase:
    sums = step.computed * step.model.hidden_size * step.product_bytes
    temporaries = _embedded(step) + activations.outputs(step) + sums
    if step.compute.recompute is Recompute.mlp:
        temporaries += 3 * step.computed * step.model.intermediate_size * step.product_bytes
    return Phase("unroll", _activations(step, step.ttt_steps - 1), 0, 0, temporaries)


def _loss(step: Step) -> Iterator[Phase]:
    kept = _activations(step, step.ttt_steps - 1)
    outputs = activations.outputs(step)
    if step.compute.loss is LossImpl.deferred:
        yield Phase("loss", kept, _loss_gradients(step), outputs + _cast_head(step), _chunk(step))
        return
    own = kept_by_reference_loss(step) + outputs
    yield Phase("loss", kept, 0, own, _reference_loss_temporaries(step))
    # The rows of a step are put back among all computed rows: two copies, and their own gradient.
    width, cast = step.model.draft_vocab_size, step.product_bytes
    put_back = 2 * step.computed * width * cast + step.judged[-1] * width * FLOAT32
    head = Parameters(step.model).lm_head * cast if step.model.lm_head_trainable else 0
    yield Phase("loss backward", kept, 2 * head, own, put_back)


def _loss_gradients(step: Step) -> int:
    """Of the layer outputs and, in float32, of ``lm_head``."""
    hidden = step.ttt_steps * step.computed * step.model.hidden_size * step.product_bytes
    return hidden + _head_gradient(step)


def _head_gradient(step: Step) -> int:
    return Parameters(step.model).lm_head * FLOAT32 if step.model.lm_head_trainable else 0


def _cast_head(step: Step) -> int:
    """A copy of ``lm_head`` in the dtype of products."""
    return Parameters(step.model).lm_head * step.product_bytes if step.mixed else 0


def _chunk_rows(step: Step) -> tuple[int, int]:
    """Target rows of a chunk of the deferred loss, and the rows of all steps that read them."""
    row_bytes = step.model.draft_vocab_size * step.product_bytes
    targets = max(CHUNK_BYTES[step.on_cpu] // (row_bytes * step.ttt_steps), 1)
    targets = min(targets, step.verifier_rows)
    return targets, min(targets * step.ttt_steps, sum(step.judged))


def _chunk_logits(step: Step) -> int:
    return sum(_chunk_rows(step)) * step.model.draft_vocab_size * step.product_bytes


def _chunk(step: Step) -> int:
    """Logits and features of a chunk, and what is made of them."""
    width, hidden, cast = step.model.draft_vocab_size, step.model.hidden_size, step.product_bytes
    _, rows = _chunk_rows(step)
    features = activations.norm(step, rows * hidden) + (rows * hidden * cast if step.mixed else 0)
    losses = min(_BLOCKS * _BLOCK_BYTES, 8 * rows * width * FLOAT32) if step.on_cpu else 0
    norm_backward = 4 if step.on_cpu else 2  # float32 values, of plain operators or one kernel
    back = rows * hidden * (cast + norm_backward * FLOAT32)
    if step.mixed and step.model.lm_head_trainable:
        # Added to the float32 sum, which a product in bfloat16 cannot do by itself.
        back = max(back, Parameters(step.model).lm_head * cast)
    return _chunk_logits(step) + features + max(losses, back)


def kept_by_reference_loss(step: Step) -> int:
    """log q and p of the judged rows, and the final norm of the computed ones, of all steps."""
    judged = sum(step.judged) * step.model.draft_vocab_size
    values = step.ttt_steps * step.computed * step.model.hidden_size
    final_norm = activations.norm(step, values, read=step.model.lm_head_trainable)
    # In float32 the input of the final norm is the layer output, kept already.
    shared = 0 if step.mixed else values * FLOAT32
    return 2 * judged * FLOAT32 + final_norm - shared


def _reference_loss_temporaries(step: Step) -> int:
    """Verifier logits of all rows; logits of the computed rows, or the losses of the judged."""
    width, cast = step.model.draft_vocab_size, step.product_bytes
    rows = step.judged[-1]
    gathered = 2 * rows * cast
    losses = gathered + 3 * rows * FLOAT32
    logits = gathered + step.computed * cast
    return width * (step.verifier_rows * cast + max(losses, logits))


def _backward(step: Step) -> Iterator[Phase]:
    """Of each TTT step the largest peak: that of its MLP, its attention or its projections."""
    cast, last = step.product_bytes, step.ttt_steps - 1
    outputs = step.computed * step.model.hidden_size * cast
    for ttt_step in reversed(range(step.ttt_steps)):
        gradients = (ttt_step + 1) * outputs + _head_gradient(step)
        if ttt_step < last:
            gradients += _weight_gradients(step) + _embedded(step)
            gradients += _keys(step, ttt_step) * cast
        kept = _activations(step, ttt_step)
        freed = activations.kept_by_mlp(step, step.compute.recompute)
        attention = _attention_temporaries(step, ttt_step)
        later = max(attention, _projection_temporaries(step, ttt_step)) - freed
        temporaries = max(_mlp_temporaries(step, ttt_step), later)
        yield Phase(f"backward of step {ttt_step}", kept, gradients, 0, temporaries)


def _weight_gradients(step: Step) -> int:
    """Sums over the steps done so far, of the layer's matrices."""
    sizes = Parameters(step.model)
    halves = 2 if step.compute.embedding_half is EmbeddingHalf.once else 1
    return (sizes.output + sizes.mlp + sizes.query_key_value // halves) * step.product_bytes


def _mlp_temporaries(step: Step, ttt_step: int) -> int:
    """Gradients of two of its tensors and of its norm, and of a weight beside the sum so far."""
    cast = step.product_bytes
    values = step.computed * (step.model.intermediate_size + step.model.hidden_size)
    one_weight = Parameters(step.model).mlp // 3 * cast
    again = 0
    if step.compute.recompute is Recompute.mlp:
        again = activations.kept_by_mlp(step, Recompute.none)
    first = ttt_step == step.ttt_steps - 1
    return 2 * values * cast + again + one_weight * (1 if first else 2)


def _keys(step: Step, ttt_step: int) -> int:
    """Values of the keys and values of TTT steps 0..ttt_step."""
    rows = step.rows + ttt_step * step.computed
    return rows * 2 * Parameters(step.model).key_width


def _attention_temporaries(step: Step, ttt_step: int) -> int:
    """Gradients of queries, keys and values, where they are cast in both dtypes.

    On a card the step-0 part runs over all rows, with zeros where none asks.
    """
    sizes, cast = Parameters(step.model), step.product_bytes
    if step.compute.attention is not AttentionImpl.merged:
        keys = step.rows + ttt_step * step.computed
        return keys * 4 * sizes.query_width * cast
    widths = FLOAT32 + (cast if step.mixed else 0)
    gradients = _keys(step, ttt_step) * widths
    if step.on_cpu:
        return gradients + step.computed * 5 * sizes.query_width * FLOAT32
    spread = step.rows * 5 * sizes.query_width * cast
    return gradients + spread + step.computed * sizes.query_width * widths


def _projection_temporaries(step: Step, ttt_step: int) -> int:
    """Gradients of what the projections read, or of the embedding half of the queries."""
    sizes, cast = Parameters(step.model), step.product_bytes
    if step.compute.embedding_half is EmbeddingHalf.once:
        return (2 * step.reached * sizes.query_width + sizes.query // 2) * cast
    rows = step.keyed(ttt_step) + 2 * step.computed
    return (rows * 2 * step.model.hidden_size + sizes.query) * cast


def _end(step: Step) -> Phase:
    """All gradients, while the halves of the last projection are joined."""
    sizes = Parameters(step.model)
    gradients = (sizes.trained + sizes.query) * FLOAT32
    kept = activations.kept_once(step) + activations.cast_weights(step)
    return Phase("end", kept, gradients, 0, _embedded(step))
