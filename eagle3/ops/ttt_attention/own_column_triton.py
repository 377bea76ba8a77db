"""Keys of the own column in Triton: the same functions as :mod:`.own_column`, each in one kernel.

A program takes a block of rows of one query head (merge) or of one key/value head with its group of
query heads (backward). Own-column keys and values stay the separate tensors that they are; each
number of them compiles its own kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024
"""Elements of one head's block of rows, so that a block of any head size fits into registers."""


class Heads(NamedTuple):
    """A tensor [A, H, D] or [A, H] as kernels take it; D is contiguous."""

    start: Tensor
    row_stride: int
    head_stride: int


def merge(
    query: Tensor,
    out: Tensor,
    lse: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Out and log-sum-exp over step-0 keys, extended by the own-column keys."""
    merged_out, merged_lse = query.new_empty(query.shape), torch.empty_like(lse)
    rows, query_heads, _ = query.shape
    constants = _constants(query, own_keys[0].shape[1], lse.dtype)
    grid = (triton.cdiv(rows, constants["ROWS"]), query_heads)
    if rows > 0:
        merge_kernel[grid](
            _heads(query), _heads(out), _heads(lse), _all_heads(own_keys), _all_heads(own_values),
            _heads(merged_out), _heads(merged_lse), rows, **constants,
        )  # fmt: skip
    return merged_out, merged_lse


def backward(
    grad_out: Tensor,
    query: Tensor,
    out: Tensor,
    lse: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
    grad_query: Tensor,
) -> list[tuple[Tensor, Tensor]]:
    """Gradients of each own-column key and value, in lse's dtype; adds to ``grad_query``."""
    if not own_keys:
        return []
    grad_keys = [key.new_empty(key.shape, dtype=lse.dtype) for key in own_keys]
    grad_values = [torch.empty_like(grad_key) for grad_key in grad_keys]
    rows, kv_heads, _ = own_keys[0].shape
    constants = _constants(query, kv_heads, lse.dtype)
    grid = (triton.cdiv(rows, constants["ROWS"]), kv_heads)
    if rows > 0:
        if grad_out.stride(-1) != 1:
            grad_out = grad_out.contiguous()
        backward_kernel[grid](
            _heads(grad_out), _heads(query), _heads(out), _heads(lse),
            _all_heads(own_keys), _all_heads(own_values),
            _heads(grad_query), _all_heads(grad_keys), _all_heads(grad_values), rows, **constants,
        )  # fmt: skip
    return list(zip(grad_keys, grad_values, strict=True))


def _constants(query: Tensor, kv_heads: int, dtype: torch.dtype) -> dict[str, Any]:
    """For both kernels."""
    _, query_heads, head_dim = query.shape
    columns = triton.next_power_of_2(head_dim)
    return {
        "HEAD_DIM": head_dim,
        "GROUP": query_heads // kv_heads,
        "COMPUTE": tl.float64 if dtype == torch.float64 else tl.float32,
        "ROWS": max(_TILE // columns, 1),
        "COLUMNS": columns,
        "num_warps": 8,
    }


def _heads(tensor: Tensor) -> Heads:
    assert tensor.ndim == 2 or tensor.stride(-1) == 1, "elements of a head lie apart"
    return Heads(tensor, tensor.stride(0), tensor.stride(1))


def _all_heads(tensors: Sequence[Tensor]) -> tuple[Heads, ...]:
    return tuple(_heads(tensor) for tensor in tensors)


@triton.jit
@no_type_check
def merge_kernel(
    query, out, lse, keys, values, merged_out, merged_lse, rows,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Extends softmax and log-sum-exp by one own-column key at a time."""
    head = tl.program_id(1)
    row, column, inside = _tile(rows, HEAD_DIM, ROWS, COLUMNS)
    query_tile = _load(query, row, head, column, inside, COMPUTE)
    total = _load(out, row, head, column, inside, COMPUTE)
    merged = _load_row_values(lse, row, head, rows)
    for j in tl.static_range(len(keys)):
        key = _load(keys[j], row, head // GROUP, column, inside, COMPUTE)
        value = _load(values[j], row, head // GROUP, column, inside, COMPUTE)
        score = tl.sum(query_tile * key, 1) * HEAD_DIM**-0.5
        # A score is finite, also where a log-sum-exp of -inf says that no key was seen yet.
        larger = tl.maximum(merged, score)
        extended = larger + tl.log(tl.exp(merged - larger) + tl.exp(score - larger))
        total *= tl.exp(merged - extended)[:, None]
        total += tl.exp(score - extended)[:, None] * value
        merged = extended
    _store(merged_out, row, head, column, inside, total)
    place = row * merged_lse.row_stride + head * merged_lse.head_stride
    tl.store(merged_lse.start + place, merged, mask=row < rows)


@triton.jit
@no_type_check
def backward_kernel(
    grad_out, query, out, lse, keys, values, grad_query, grad_keys, grad_values, rows,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """First queries, then keys and values: held together they would not fit into registers."""
    kv_head = tl.program_id(1)
    row, column, inside = _tile(rows, HEAD_DIM, ROWS, COLUMNS)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        tiles = _query_side(grad_out, query, out, lse, row, head, column, inside, rows, COMPUTE)
        total = _load(grad_query, row, head, column, inside, COMPUTE)
        for j in tl.static_range(len(keys)):
            key = _load(keys[j], row, kv_head, column, inside, COMPUTE)
            value = _load(values[j], row, kv_head, column, inside, COMPUTE)
            _, grad_score = _weight_and_slope(tiles, key, value, HEAD_DIM)
            total += grad_score[:, None] * key
        _store(grad_query, row, head, column, inside, total)
    for j in tl.static_range(len(keys)):
        key = _load(keys[j], row, kv_head, column, inside, COMPUTE)
        value = _load(values[j], row, kv_head, column, inside, COMPUTE)
        grad_key = tl.zeros([ROWS, COLUMNS], COMPUTE)
        grad_value = tl.zeros([ROWS, COLUMNS], COMPUTE)
        for member in range(GROUP):
            head = kv_head * GROUP + member
            tiles = _query_side(grad_out, query, out, lse, row, head, column, inside, rows, COMPUTE)
            weight, grad_score = _weight_and_slope(tiles, key, value, HEAD_DIM)
            grad_key += grad_score[:, None] * tiles[1]
            grad_value += weight[:, None] * tiles[0]
        _store(grad_keys[j], row, kv_head, column, inside, grad_key)
        _store(grad_values[j], row, kv_head, column, inside, grad_value)


@triton.jit
@no_type_check
def _query_side(
    grad_out, query, out, lse, row, head, column, inside, rows, COMPUTE: tl.constexpr
):  # fmt: skip
    """Gradient of out, query, out [ROWS, COLUMNS] and log-sum-exp [ROWS] of one query head."""
    return (
        _load(grad_out, row, head, column, inside, COMPUTE),
        _load(query, row, head, column, inside, COMPUTE),
        _load(out, row, head, column, inside, COMPUTE),
        _load_row_values(lse, row, head, rows),
    )


@triton.jit
@no_type_check
def _weight_and_slope(tiles, key, value, HEAD_DIM: tl.constexpr):
    """Softmax weight [ROWS] of an own-column key, and the gradient of its unscaled score."""
    grad_out, query, out, lse = tiles
    scale: tl.constexpr = HEAD_DIM**-0.5
    weight = tl.exp(tl.sum(query * key, 1) * scale - lse)
    return weight, scale * weight * tl.sum(grad_out * (value - out), 1)


@triton.jit
@no_type_check
def _tile(rows, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows of this program, columns of a head, and which of the tile lie inside both."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    return row, column, (row < rows)[:, None] & (column < HEAD_DIM)[None, :]


@triton.jit
@no_type_check
def _load(heads, row, head, column, inside, COMPUTE: tl.constexpr):
    place = row[:, None] * heads.row_stride + head * heads.head_stride + column[None, :]
    return tl.load(heads.start + place, mask=inside, other=0.0).to(COMPUTE)


@triton.jit
@no_type_check
def _store(heads, row, head, column, inside, tile):
    place = row[:, None] * heads.row_stride + head * heads.head_stride + column[None, :]
    tl.store(heads.start + place, tile.to(heads.start.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _load_row_values(heads, row, head, rows):
    place = row * heads.row_stride + head * heads.head_stride
    return tl.load(heads.start + place, mask=row < rows, other=0.0)
