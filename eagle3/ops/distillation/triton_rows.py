"""Row statistics and in-place gradients of all losses in one Triton kernel.

The formulas are those of :mod:`eagle3.ops.distillation.closed_form`. One program judges one row in
three passes over its V logits, of which the later ones find the row in the cache::

    1  draft logits       largest, first id of it, log sum exp(logit - largest)
    2  both logits        sums that the losses and their gradients need
    3  both logits        gradient, over the draft logits            only with ``weights``

What pass 1 finds is found once a verifier row by a kernel of its own. Each mix compiles its own
kernel, without the terms that weigh nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from eagle3.ops.distillation.rows import Mix, RowStatistics

_LARGEST_BLOCK = 8192
"""Logits of a row in registers at a time."""

LOG_2: tl.constexpr = tl.constexpr(0.6931471805599453)


class Weights(NamedTuple):
    """Weight of each loss in the mix, a constant of the compiled kernel."""

    kl: float
    reverse_kl: float
    js: float
    ce: float
    tv: float
    nla: float
    lk_hybrid: float


class Rows(NamedTuple):
    """A matrix as kernels take it; its last axis is contiguous."""

    start: Tensor
    stride: int


class Normalisers(NamedTuple):
    """Of each verifier row."""

    top: Tensor
    """The largest logit."""
    log_sum: Tensor
    """log sum exp(logit - top)"""
    best: Tensor
    """int64, the first id with the largest logit."""


@torch.no_grad()
def row_statistics(
    draft_logits: Float[Tensor, "R V"],
    verifier_logits: Float[Tensor, "C V"],
    targets: Int[Tensor, " R"],
    mix: Mix,
    *,
    weights: Float[Tensor, " R"] | None = None,
    with_overlap: bool = False,
) -> RowStatistics:
    """As :func:`eagle3.ops.distillation.closed_form.row_statistics`; the last axes are contiguous.

    Rows may lie further apart than V logits.
    """
    assert draft_logits.stride(-1) == verifier_logits.stride(-1) == 1, "logits of a row lie apart"
    dtype = torch.promote_types(draft_logits.dtype, torch.float32)
    rows, width = draft_logits.shape
    loss = draft_logits.new_empty(rows, dtype=dtype)
    best = targets.new_empty(rows, dtype=torch.int64)
    overlap = torch.empty_like(loss) if with_overlap else None
    if rows > 0:
        verifier = Rows(verifier_logits, verifier_logits.stride(0))
        row_kernel[(rows,)](
            Rows(draft_logits, draft_logits.stride(0)), verifier, _normalise(verifier, dtype),
            targets.contiguous(), None if weights is None else weights.contiguous(),
            loss, best, overlap, width, _mixed(mix),
            # Half the range leaves room to subtract another log-probability.
            FLOOR=torch.finfo(dtype).min / 2, **_constants(width, dtype),
        )  # fmt: skip
    return RowStatistics(loss, best, overlap)


def _mixed(mix: Mix) -> Weights:
    """The weight of each loss; 0 where it is not named, the sum where it is named twice."""
    return Weights(*(float(sum(w for name, w in mix if name == loss)) for loss in Weights._fields))


def _constants(width: int, dtype: torch.dtype) -> dict[str, Any]:
    """For both kernels."""
    block = min(triton.next_power_of_2(width), _LARGEST_BLOCK)
    return {
        "COMPUTE": tl.float64 if dtype == torch.float64 else tl.float32,
        "BLOCK": block,
        "num_warps": max(min(block // 512, 16), 1),
    }


def _normalise(verifier: Rows, dtype: torch.dtype) -> Normalisers:
    rows, width = verifier.start.shape
    top = verifier.start.new_empty(rows, dtype=dtype)
    best = torch.empty_like(top, dtype=torch.int64)
    found = Normalisers(top, torch.empty_like(top), best)
    verifier_kernel[(rows,)](verifier, found, width, **_constants(width, dtype))
    return found


@triton.jit
@no_type_check
def verifier_kernel(verifier, found, width, COMPUTE: tl.constexpr, BLOCK: tl.constexpr):
    """Fills the :class:`Normalisers` ``found`` of each row."""
    row = tl.program_id(0).to(tl.int64)
    logits = verifier.start + row * verifier.stride
    top, log_sum, best = _normaliser(logits, width, COMPUTE, BLOCK)
    tl.store(found.top + row, top)
    tl.store(found.log_sum + row, log_sum)
    tl.store(found.best + row, best)


@triton.jit
@no_type_check
def row_kernel(
    draft, verifier, normalisers, targets, weights, loss, best, overlap, width,
    MIX: tl.constexpr, FLOOR: tl.constexpr, COMPUTE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row; ``weights`` and ``overlap`` may be None."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row).to(tl.int64)
    draft_row = draft.start + row * draft.stride
    verifier_row = verifier.start + target * verifier.stride
    p = (tl.load(normalisers.top + target), tl.load(normalisers.log_sum + target))
    verifier_best = tl.load(normalisers.best + target)
    top, log_sum, draft_best = _normaliser(draft_row, width, COMPUTE, BLOCK)
    q = (top, log_sum)
    tl.store(best + row, draft_best)
    sums = _sums(
        draft_row, verifier_row, q, p, verifier_best, width, overlap is not None,
        MIX, FLOOR, COMPUTE, BLOCK,
    )  # fmt: skip
    tl.store(loss + row, _loss(sums, MIX, COMPUTE))
    if overlap is not None:
        tl.store(overlap + row, sums[0])
    if weights is not None:
        weight = tl.load(weights + row).to(COMPUTE)
        _gradient(
            draft_row, verifier_row, q, p, verifier_best, width, weight, sums,
            MIX, FLOOR, COMPUTE, BLOCK,
        )  # fmt: skip


@triton.jit
@no_type_check
def _normaliser(row, width, COMPUTE: tl.constexpr, BLOCK: tl.constexpr):
    """Largest logit, log sum exp(logit - largest), first id of the largest."""
    top = tl.full([], -float("inf"), COMPUTE)
    total = tl.full([], 0, COMPUTE)
    best = tl.full([], 0, tl.int64)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        logits = tl.load(row + columns, mask=columns < width, other=-float("inf")).to(COMPUTE)
        block_top, place = tl.max(logits, 0, return_indices=True)
        best = tl.where(block_top > top, (start + place).to(tl.int64), best)
        larger = tl.maximum(top, block_top)
        # Anything finite will do where all ids so far are excluded.
        base = tl.where(larger == -float("inf"), 0.0, larger)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(logits - base), 0)
        top = larger
    return top, tl.log(total), best


@triton.jit
@no_type_check
def _log_probabilities(row, columns, width, normaliser, FLOOR: tl.constexpr, COMPUTE: tl.constexpr):
    """Finite everywhere: the floor stands for excluded ids, and for those past the end."""
    logits = tl.load(row + columns, mask=columns < width, other=-float("inf")).to(COMPUTE)
    return tl.maximum(logits - normaliser[0] - normaliser[1], FLOOR)


@triton.jit
@no_type_check
def _sums(
    draft_row, verifier_row, q_normaliser, p_normaliser, best, width,
    OVERLAP: tl.constexpr, MIX: tl.constexpr,
    FLOOR: tl.constexpr, COMPUTE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums over the row by loss, 0 where the mix does not need them; see the returned tuples."""
    zero = tl.full([], 0, COMPUTE)
    overlap, kl, reverse_kl, ce = zero, zero, zero, zero
    to_p, to_q = zero, zero
    distance, slope = zero, zero
    least_top, least_sum, side_sum = tl.full([], FLOOR, COMPUTE), zero, zero
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        log_q = _log_probabilities(draft_row, columns, width, q_normaliser, FLOOR, COMPUTE)
        log_p = _log_probabilities(verifier_row, columns, width, p_normaliser, FLOOR, COMPUTE)
        q, p = tl.exp(log_q), tl.exp(log_p)
        if OVERLAP or MIX.lk_hybrid > 0:
            overlap += tl.sum(tl.minimum(p, q), 0)
        if MIX.kl > 0 or MIX.lk_hybrid > 0:
            kl += tl.sum(p * (log_p - log_q), 0)
        if MIX.reverse_kl > 0:
            reverse_kl += tl.sum(q * (log_q - log_p), 0)
        if MIX.ce > 0:
            ce -= tl.sum(tl.where(columns == best, log_q, 0.0), 0)
        if MIX.js > 0:
            log_m = _log_mean(log_p, log_q)
            to_p += tl.sum(p * (log_p - log_m), 0)
            to_q += tl.sum(q * (log_q - log_m), 0)
        if MIX.tv > 0 or MIX.lk_hybrid > 0:
            distance += tl.sum(tl.abs(p - q), 0)
            slope += tl.sum(q * _sign(q, p), 0)
        if MIX.nla > 0:
            least = tl.minimum(log_p, log_q)
            larger = tl.maximum(least_top, tl.max(least, 0))
            scale = tl.exp(least_top - larger)
            shares = tl.exp(least - larger)
            least_sum = least_sum * scale + tl.sum(shares, 0)
            side_sum = side_sum * scale + tl.sum(shares * _side(log_q, log_p), 0)
            least_top = larger
    return overlap, kl, reverse_kl, ce, (to_p, to_q), (distance, slope), (
        least_top, least_sum, side_sum
    )  # fmt: skip


@triton.jit
@no_type_check
def _loss(sums, MIX: tl.constexpr, COMPUTE: tl.constexpr):
    """The mixed loss of a row."""
    overlap, kl, reverse_kl, ce, js, tv, nla = sums
    loss = tl.full([], 0, COMPUTE)
    if MIX.kl > 0:
        loss += MIX.kl * kl
    if MIX.reverse_kl > 0:
        loss += MIX.reverse_kl * reverse_kl
    if MIX.js > 0:
        loss += MIX.js * (js[0] + js[1]) / 2
    if MIX.ce > 0:
        loss += MIX.ce * ce
    if MIX.tv > 0:
        loss += MIX.tv * tv[0] / 2
    if MIX.nla > 0:
        loss -= MIX.nla * (nla[0] + tl.log(nla[1]))
    if MIX.lk_hybrid > 0:
        share = tl.exp(-3 * overlap)
        loss += MIX.lk_hybrid * (share * kl + (1 - share) * tv[0] / 2)
    return loss


@triton.jit
@no_type_check
def _gradient(
    draft_row, verifier_row, q_normaliser, p_normaliser, best, width, weight, sums,
    MIX: tl.constexpr, FLOOR: tl.constexpr, COMPUTE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Overwrites the draft logits by the gradient of ``weight`` times the loss."""
    overlap, _, reverse_kl, _, js, tv, nla = sums
    share = tl.exp(-3 * overlap)
    # The weight comes first, so that a weight of 0 gives 0 also where a loss is beyond any float.
    kl_weight = weight * (MIX.kl + MIX.lk_hybrid * share)
    tv_weight = weight * (MIX.tv + MIX.lk_hybrid * (1 - share))
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        log_q = _log_probabilities(draft_row, columns, width, q_normaliser, FLOOR, COMPUTE)
        log_p = _log_probabilities(verifier_row, columns, width, p_normaliser, FLOOR, COMPUTE)
        q, p = tl.exp(log_q), tl.exp(log_p)
        gradient = tl.zeros([BLOCK], COMPUTE)
        if MIX.kl > 0 or MIX.lk_hybrid > 0:
            gradient += kl_weight * (q - p)
        if MIX.reverse_kl > 0:
            gradient += weight * MIX.reverse_kl * (q * (log_q - log_p - reverse_kl))
        if MIX.js > 0:
            gradient += weight * MIX.js / 2 * (q * (log_q - _log_mean(log_p, log_q) - js[1]))
        if MIX.ce > 0:
            gradient += weight * MIX.ce * (q - tl.where(columns == best, 1.0, 0.0))
        if MIX.tv > 0 or MIX.lk_hybrid > 0:
            gradient += tv_weight / 2 * (q * (_sign(q, p) - tv[1]))
        if MIX.nla > 0:
            shares = tl.exp(tl.minimum(log_p, log_q) - nla[0])
            free = shares * _side(log_q, log_p) - q * nla[2]
            gradient += weight * MIX.nla * (free / nla[1])
        gradient = gradient.to(draft_row.dtype.element_ty)
        tl.store(draft_row + columns, gradient, mask=columns < width)


@triton.jit
@no_type_check
def _log_mean(log_p, log_q):
    """log((p + q) / 2)"""
    apart = tl.exp(-tl.abs(log_p - log_q))
    return tl.maximum(log_p, log_q) + tl.log(1 + apart) - LOG_2


@triton.jit
@no_type_check
def _sign(q, p):
    """sign(q - p)"""
    return tl.where(q > p, 1.0, tl.where(q < p, -1.0, 0.0))


@triton.jit
@no_type_check
def _side(log_q, log_p):
    """-1 where q < p, 0 where q > p, and between them at a tie, as torch.minimum has it."""
    return tl.where(log_q > log_p, 0.0, tl.where(log_q < log_p, -1.0, -0.5))
