"""Bytes that one training step keeps for its backward, read off the code of the step.

A product keeps its input in the dtype of products (c bytes a value); a norm its input in float32
and, without a fused kernel (on CPU), also the normalised input; the MLP gate, ``silu(gate)``, up
and their product. Of a row at a TTT step, H hidden values, I of the MLP, with recompute ``none``::

    hidden norm   4H (+4H on CPU) + cH      output projection, MLP norm   4H (+4H on CPU) + cH
    attention     2c Hq D + 4 Hq            keys and values               2c Hkv D
    rotary        cos and sin               MLP                           4c I

Weights that autocast casts are kept once in bfloat16, whatever the rows.
"""

from __future__ import annotations

from eagle3.names import (
    Arch,
    AttentionImpl,
    ComputedRows,
    EmbeddingHalf,
    LossImpl,
    NormPreset,
    Recompute,
)
from eagle3.planning.sizes import Parameters, Step

FLOAT32 = 4


def kept_once(step: Step) -> int:
    """Of the whole pack: input of ``fc``, and of the embedding half where it is made once."""
    hidden, width = step.model.hidden_size, step.model.num_aux_layers * step.model.hidden_size
    cast, kept = step.product_bytes, 0
    if step.mixed:
        kept += step.rows * width * cast
    if step.model.norm_layout is not NormPreset.portable:
        kept += step.rows * width * (FLOAT32 + cast)
    if step.compute.embedding_half is EmbeddingHalf.once:
        # Queries read rows of their own, and autocast casts for keys and for values.
        reads = 2 * cast if step.mixed else FLOAT32
        kept += hidden * (step.rows * (FLOAT32 + reads) + step.reached * cast)
    return kept


def cast_weights(step: Step) -> int:
    """Copies of weights in the dtype of products, kept from first use to the end of backward."""
    if not step.mixed:
        return 0
    sizes = Parameters(step.model)
    head = sizes.lm_head if step.compute.loss is LossImpl.reference else 0
    return (sizes.body + head) * step.product_bytes


def kept_by_step(step: Step, ttt_step: int) -> int:
    """Of one TTT step, its loss left out."""
    return (
        _projection(step, ttt_step)
        + _rotary(step, ttt_step)
        + _attention(step, ttt_step)
        + _between(step)
        + kept_by_mlp(step, step.compute.recompute)
    )


def kept_by_mlp(step: Step, recompute: Recompute) -> int:
    """Of one TTT step: the norm before the MLP with its input, and the MLP."""
    hidden, cast = step.model.hidden_size, step.product_bytes
    if recompute is Recompute.mlp:
        return step.computed * hidden * cast
    values = step.computed * step.model.intermediate_size
    return norm(step, step.computed * hidden) + 4 * values * cast


def norm(step: Step, values: int, *, read: bool = True) -> int:
    """Bytes that an RMSNorm keeps of its input values; ``read``: a product keeps its output."""
    normalised = FLOAT32 if step.on_cpu else 0
    return values * (FLOAT32 + normalised + (step.product_bytes if read else 0))


def outputs(step: Step) -> int:
    """Layer outputs that only the loss still needs, where the next norm keeps copies of its own."""
    last_only = 1 if step.product_bytes == FLOAT32 else step.ttt_steps
    return last_only * step.computed * step.model.hidden_size * step.product_bytes


def _projection(step: Step, ttt_step: int) -> int:
    """The norm of the hidden state and what the projections read."""
    hidden, cast = step.model.hidden_size, step.product_bytes
    rows = step.keyed(ttt_step)
    picked = step.computed if ttt_step == 0 and step.compute.rows is ComputedRows.read else 0
    if step.compute.embedding_half is EmbeddingHalf.once:
        return norm(step, rows * hidden) + picked * hidden * cast
    embedding_norm = rows * hidden * FLOAT32
    mixed_rows = (rows + picked) * 2 * hidden * cast
    return norm(step, rows * hidden, read=False) + embedding_norm + mixed_rows


def _rotary(step: Step, ttt_step: int) -> int:
    """cos and sin; one pair for keys and queries where neither is cast nor picked."""
    rows = step.keyed(ttt_step)
    shared = not step.mixed and (ttt_step > 0 or step.compute.rows is ComputedRows.all)
    asking = 0 if shared else step.computed
    kept = (rows + asking) * 2 * step.model.head_dim * step.product_bytes
    if step.model.arch is Arch.qwen3:
        sizes = Parameters(step.model)
        values = step.computed * sizes.query_width + rows * sizes.key_width
        kept += norm(step, values, read=False)
    return kept


def _attention(step: Step, ttt_step: int) -> int:
    """Queries, output (which the output projection reads), log-sum-exp, keys and values."""
    sizes, cast, asking = Parameters(step.model), step.product_bytes, step.computed
    queries = asking * (2 * sizes.query_width * cast + step.model.num_attention_heads * FLOAT32)
    if step.compute.attention is AttentionImpl.merged:
        return queries + step.keyed(ttt_step) * 2 * sizes.key_width * cast
    keys = step.rows + ttt_step * asking
    if step.compute.attention is AttentionImpl.sdpa:
        # Keys of all steps side by side, repeated for each query head, and the mask.
        return queries + keys * (2 * sizes.query_width + asking) * cast
    weights = asking * step.model.num_attention_heads * keys * FLOAT32
    return queries + weights + keys * 2 * sizes.query_width * FLOAT32


def _between(step: Step) -> int:
    """The norm of the fed-back state, in layouts that have one."""
    if step.model.norm_layout is NormPreset.portable:
        return 0
    return norm(step, step.computed * step.model.hidden_size, read=False)
