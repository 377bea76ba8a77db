"""Attention of the TTT unroll: causal over step-0 keys, plus the later keys of the own column.

At TTT step s (0-based) row i of a document sees the step-0 keys of rows 0..i of its document and,
of every later step t = 1..s, only the key its own column produced::

    step 2, row 3 of a document     step-0 keys   k0 k1 k2 k3  .        (rows 0..3)
                                    step-1 keys    .  .  . k3'  .       (own column)
                                    step-2 keys    .  .  . k3"  .       (own column)
    token position of the key                     0  1  2  3
                                                           4
                                                              5
    token position of the query: i + s = 5

A window w counts token positions: a key is visible iff query position - key position < w, here
5 - position < w. With w = 4 row 3 sees k2, k3, k3' and k3".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from eagle3.errors import ConfigError
from eagle3.ops.ttt_attention import merged, reference, sdpa
from eagle3.ops.ttt_attention.layout import DocumentLayout

Queries = Float[Tensor, "A Hq D"]
Keys = Float[Tensor, "_ Hkv D"]

IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {
    "reference": reference.attend,
    "sdpa": sdpa.attend,
    "merged": merged.attend,
}


def ttt_attention(
    query: Queries,
    step_keys: Sequence[Keys],
    step_values: Sequence[Keys],
    layout: DocumentLayout,
    *,
    implementation: str,
    window: int | None = None,
) -> Queries:
    """Attention output of TTT step s = ``len(step_keys) - 1`` for the query rows, in their dtype.

    Scores are scaled by ``D ** -0.5``; query head h reads key/value head ``h // (Hq // Hkv)``.
    Rotary embedding is the caller's. Under autocast inputs are cast to its dtype first, as PyTorch
    does for its own attention. A = 0 gives an empty tensor with a graph.

    Args:
        query: queries of the rows that ask, at step s.
        step_keys: keys of steps 0..s, one tensor a step: of all L rows at step 0, of the A rows
            that ask later.
        step_values: values of steps 0..s, likewise.
        layout: documents of the L rows, and the rows that ask.
        implementation: a key of ``IMPLEMENTATIONS``; all are exact.
        window: visible token positions (query position - key position < window); None: all.

    Raises:
        ConfigError: unknown implementation, or a window below 1.
    """
    _check(query, step_keys, step_values, layout, implementation, window)
    attend = IMPLEMENTATIONS[implementation]
    dtype = _autocast_dtype(query)
    if dtype is None:
        return attend(query, step_keys, step_values, layout, window)
    keys = [key.to(dtype) for key in step_keys]
    values = [value.to(dtype) for value in step_values]
    with torch.autocast(query.device.type, enabled=False):
        return attend(query.to(dtype), keys, values, layout, window)


def _check(
    query: Tensor,
    step_keys: Sequence[Tensor],
    step_values: Sequence[Tensor],
    layout: DocumentLayout,
    implementation: str,
    window: int | None,
) -> None:
    if implementation not in IMPLEMENTATIONS:
        raise ConfigError(
            f"compute.attention: unknown implementation {str(implementation)!r}; "
            f"expected one of {', '.join(IMPLEMENTATIONS)}"
        )
    if window is not None and window < 1:
        raise ConfigError(
            f"model.sliding_window: found {window}, expected at least 1 token position; "
            "set it to null to see all keys"
        )
    assert len(step_keys) == len(step_values) >= 1, "one key and one value tensor a step"
    assert layout.rows == step_keys[0].shape[0], "step-0 keys are those of all rows"
    assert layout.queries == query.shape[0], "one query for each row that asks"
    assert all(key.shape[0] == layout.queries for key in step_keys[1:]), "own keys of these rows"
    assert query.shape[1] % step_keys[0].shape[1] == 0, "heads must divide into key/value groups"


def _autocast_dtype(query: Tensor) -> torch.dtype | None:
    device = query.device.type
    if query.dtype == torch.float64 or not torch.amp.is_autocast_available(device):
        return None
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
