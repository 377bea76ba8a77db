"""Walking an answer in rounds of speculative decoding, when what each round accepts is known."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def answer_rows(loss_mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Rows [n - 1] that emit an answer token: row i reads x_{i+1} and emits x_{i+2}.

    Gates l_{i+1} and l_{i+2} are one: the first answer token comes from the prefill, and nothing is
    drafted after the last.
    """
    rows = np.zeros(max(len(loss_mask) - 1, 0), dtype=bool)
    rows[:-1] = loss_mask[1:-1] & loss_mask[2:]
    return rows


def walk(
    walkable: NDArray[np.bool_], accepted: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens emitted and drafts accepted by each round, int64 [R] both.

    ``walkable`` [n] marks rows that emit an answer token, ``accepted`` [n] how many drafts a round
    started there gets accepted; a round emits one more, but never past its answer. Example:
    walkable 1 1 1 1 1, accepted 2 0 0 3 0: rounds start at rows 0 (emits 3) and 3 (emits the 2
    that are left).
    """
    ends = np.flatnonzero(np.diff(walkable.astype(np.int8), append=0) == -1) + 1
    emitted, taken = [], []
    row = 0
    for end in ends.tolist():
        while row < end:
            if not walkable[row]:
                row += 1
                continue
            found, left = int(accepted[row]), end - row
            emitted.append(min(found + 1, left))
            taken.append(min(found, left))
            row += emitted[-1]
    return np.array(emitted, np.int64), np.array(taken, np.int64)


def replay(walkable: NDArray[np.bool_], accepted: NDArray[np.int64]) -> tuple[int, int]:
    """(tokens emitted, rounds) of :func:`walk`; in its example 5 and 2, length 2.5."""
    emitted, _ = walk(walkable, accepted)
    return int(emitted.sum()), len(emitted)
