"""Documents to segments to packs: pure, and the same on every rank.

A document of n tokens has n - 1 rows. One with more rows than ``max_seq_len`` is split, drawn for
10 rows, ``max_seq_len`` 6, two context rows and three TTT steps (two look-ahead rows)::

    row        0  1  2  3  4  5  6  7  8  9
    segment 1  o  o  o  o  >  >                 o own: draft chains start here
    segment 2        <  <  o  o  >  >           < context: gives keys only
    segment 3              <  <  o  o  o  o     > look-ahead: gives inputs and targets only

Step s of row i reads row i + s, hence ttt_steps - 1 look-ahead rows: every (row, step) that the
document has is trained exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from eagle3.data.masks import Runs
from eagle3.data.segments import Pack, Packs, Segment, SegmentTable, offsets_of
from eagle3.errors import ConfigError
from eagle3.names import LongDocuments

__all__ = [
    "Pack",
    "PackingRule",
    "Packs",
    "Segment",
    "Segmentation",
    "best_fit_decreasing",
    "pack_epoch",
    "segment_documents",
    "split_rows",
]

WINDOW_DOCUMENTS = 8192
"""Documents packed together: enough for a fill above 99.8 %, few enough to keep the shuffle."""


@dataclass(frozen=True)
class PackingRule:
    """How documents are cut."""

    max_seq_len: int
    """Rows of a pack."""
    long_documents: LongDocuments
    split_context_tokens: int
    """Most context rows of a segment that does not start its document."""
    steps: int
    """TTT steps, or draft steps of the validation."""


@dataclass(frozen=True)
class Segmentation:
    """All segments that are trained in an epoch, and what the cutting cost. Counts are rows."""

    segments: Packs
    """One entry per document that is used, its segments in order; not packed yet."""
    unsupervised_documents: int
    """Left out: no row is gated."""
    long_documents: int
    """Documents of more than ``max_seq_len`` rows."""
    dropped_documents: int
    """Long documents of which nothing is left."""
    lost_rows: int
    """Rows of long documents removed by ``truncate`` or ``drop``."""
    overhead_rows: int
    """Context and look-ahead rows, laid a second time."""
    supervised_rows: int
    """Gated rows in which a chain starts."""
    clipped_rows: int
    """Of these, the ones whose segment does not reach back to row 0."""


def segment_documents(
    documents: Iterable[int] | NDArray[np.int64],
    lengths: NDArray[np.int64],
    gates: Runs,
    rule: PackingRule,
) -> Segmentation:
    """Cut ``documents``, of which one may come more than once.

    ``lengths`` [D] in tokens and ``gates`` (rows) are of the whole index. Segments without a gated
    row are left out: no loss would read them.

    Raises:
        ConfigError: a document must be split, and context and look-ahead leave no own row.
    """
    chosen = (
        np.fromiter(documents, np.int64) if not isinstance(documents, np.ndarray) else documents
    )
    totals = gates.totals()[chosen]
    used = chosen[totals > 0]
    rows = lengths[used] - 1
    is_long = rows > rule.max_seq_len
    table, sizes = _cut(used, _kept_rows(rows, rule), rule)
    table, sizes = _without_ungated(table, sizes, gates)
    own = table.own_rows
    lost = 0
    if rule.long_documents is not LongDocuments.split:
        lost = int(rows[is_long].sum() - own[np.repeat(is_long, sizes)].sum())
    return Segmentation(
        segments=Packs(table, np.arange(len(table)), offsets_of(sizes[sizes > 0])),
        unsupervised_documents=len(chosen) - len(used),
        long_documents=int(np.count_nonzero(is_long)),
        dropped_documents=int(np.count_nonzero(is_long & (sizes == 0))),
        lost_rows=lost,
        overhead_rows=int((table.rows - own).sum()),
        supervised_rows=int(table.supervised.sum()),
        clipped_rows=int(table.supervised[table.start > 0].sum()),
    )


def split_rows(document: int, rows: int, rule: PackingRule) -> Pack:
    """Cut ``rows`` rows as drawn above; the own ranges cover every row exactly once.

    Raises:
        ConfigError: context and look-ahead leave no own row.
    """
    table, sizes = _cut(np.array([document]), np.array([rows]), rule)
    return Packs(table, np.arange(len(table)), offsets_of(sizes))[0]


def pack_epoch(documents: Packs, max_seq_len: int, seed: int, epoch: int) -> Packs:
    """The packs of an epoch, shuffled, from ``(seed, epoch)`` alone."""
    rng = np.random.default_rng([seed, epoch])
    shuffled = documents.select(rng.permutation(len(documents)))
    rows = shuffled.table.rows[shuffled.order]
    windows = max(-(-len(documents) // WINDOW_DOCUMENTS), 1)
    ends = shuffled.offsets[np.arange(windows + 1) * len(documents) // windows]
    numbers = np.empty(len(rows), np.int64)
    packs = 0
    for start, stop in pairwise(ends.tolist()):
        numbers[start:stop] = packs + best_fit_decreasing(rows[start:stop], max_seq_len)
        packs = int(numbers[start:stop].max(initial=packs - 1)) + 1
    by_pack = np.argsort(numbers, kind="stable")
    packed = Packs(
        shuffled.table,
        shuffled.order[by_pack],
        offsets_of(np.bincount(numbers, minlength=packs)),
    )
    return packed.select(rng.permutation(packs))


def best_fit_decreasing(rows: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Lay each segment, long ones first, into the fullest pack that has room for it.

    ``rows`` [S] are the segments' sizes, at most ``capacity``; returns the pack of each, [S].
    """
    assert rows.max(initial=0) <= capacity, "a segment is longer than a pack"
    full = rows == capacity
    packs = int(np.count_nonzero(full))
    numbers = np.empty(len(rows), np.int64)
    numbers[full] = np.arange(packs)
    order = np.argsort(-rows, kind="stable")[packs:]
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r is set when some open pack has exactly r free rows
    found = []
    for size in rows[order].tolist():
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            pack = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, pack = capacity, packs
            packs += 1
        found.append(pack)
        room -= size
        if room:
            with_room[room].append(pack)
            rooms |= 1 << room
    numbers[order] = found
    return numbers


def _kept_rows(rows: NDArray[np.int64], rule: PackingRule) -> NDArray[np.int64]:
    """Rows of each document that are laid at all."""
    match rule.long_documents:
        case LongDocuments.split:
            return rows
        case LongDocuments.truncate:
            return np.minimum(rows, rule.max_seq_len)
        case LongDocuments.drop:
            return np.where(rows > rule.max_seq_len, 0, rows)


def _cut(
    documents: NDArray[np.int64], rows: NDArray[np.int64], rule: PackingRule
) -> tuple[SegmentTable, NDArray[np.int64]]:
    """Segments of each document in turn, not counted as supervised yet, and how many each has.

    The first segment owns ``first`` rows and every further one ``later``, but the last, which is
    the first that reaches the document's end. A document without rows has none.
    """
    limit, context, look_ahead = rule.max_seq_len, rule.split_context_tokens, rule.steps - 1
    first, later = limit - look_ahead, limit - look_ahead - context
    longest = int(rows.max(initial=0))
    if longest > limit and later <= 0:
        raise ConfigError(
            f"data.split_context_tokens={context} and {look_ahead} look-ahead rows leave nothing "
            f"of {limit} rows (max_seq_len, or val.max_seq_len in validation), but a document of "
            f"{longest} rows must be split. Expected their sum below it: lower "
            "data.split_context_tokens or raise the limit."
        )
    beyond = np.maximum(rows - limit + context - first, 0)  # of a second segment
    sizes = np.where(rows > limit, 2 + -(-beyond // max(later, 1)), np.minimum(rows, 1))
    rows = np.repeat(rows, sizes)
    number = np.arange(len(rows)) - np.repeat(offsets_of(sizes)[:-1], sizes)
    own_start = np.where(number > 0, first + (number - 1) * later, 0)
    start = np.maximum(own_start - context, 0)
    stop = np.minimum(start + limit, rows)
    own_stop = np.where(stop == rows, rows, stop - look_ahead)
    columns = (np.repeat(documents, sizes), start, stop, own_start, own_stop, np.zeros_like(rows))
    return SegmentTable(*(column.astype(np.int32) for column in columns)), sizes


def _without_ungated(
    table: SegmentTable, sizes: NDArray[np.int64], gates: Runs
) -> tuple[SegmentTable, NDArray[np.int64]]:
    """Count supervised rows, and leave out the segments that have no gated row to read.

    Rows before the own ones gate nothing in a segment; look-ahead rows gate its later steps.
    """
    documents = table.document.astype(np.int64)
    supervised = gates.count(documents, table.own_start, table.own_stop)
    ahead = gates.count(documents, table.own_stop, table.stop)
    gated = supervised + ahead > 0
    cumulated = offsets_of(gated)
    ends = offsets_of(sizes)
    counted = replace(table, supervised=supervised.astype(np.int32))
    return counted.take(gated), cumulated[ends[1:]] - cumulated[ends[:-1]]
