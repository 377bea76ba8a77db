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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagle3.data.masks import Runs
from eagle3.errors import ConfigError
from eagle3.names import LongDocuments

WINDOW_DOCUMENTS = 8192
"""Documents packed together: enough for a fill above 99 %, few enough to keep the shuffle."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows ``[start, stop)`` of a document; draft chains start in ``[own_start, own_stop)``."""

    document: int
    start: int
    stop: int
    own_start: int
    own_stop: int

    @property
    def rows(self) -> int:
        """Rows it takes in a pack."""
        return self.stop - self.start


Pack = tuple[Segment, ...]
"""Segments laid end to end; () is an empty pack."""


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

    segments: tuple[Pack, ...]
    """One entry per document that is used, its segments in order."""
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
    documents: Iterable[int], lengths: NDArray[np.int64], gates: Runs, rule: PackingRule
) -> Segmentation:
    """Cut ``documents``; ``lengths`` [D] in tokens and ``gates`` (rows) are of the whole index.

    Segments without a gated row are left out: no loss would read them.

    Raises:
        ConfigError: a document must be split, and context and look-ahead leave no own row.
    """
    totals, tokens = gates.totals().tolist(), lengths.tolist()
    kept: list[Pack] = []
    unsupervised = long = dropped = lost = overhead = supervised = clipped = 0
    for document in documents:
        rows = tokens[document] - 1
        if totals[document] == 0:
            unsupervised += 1
            continue
        if rows <= rule.max_seq_len:
            kept.append((Segment(document, 0, rows, 0, rows),))
            supervised += totals[document]
            continue
        long += 1
        segments = _cut(document, rows, gates, rule)
        own = sum(s.own_stop - s.own_start for s in segments)
        overhead += sum(s.rows for s in segments) - own
        if rule.long_documents is not LongDocuments.split:
            lost += rows - own
        for s in segments:
            gated = gates.count(document, s.own_start, s.own_stop)
            supervised += gated
            clipped += gated if s.start else 0
        if segments:
            kept.append(segments)
        else:
            dropped += 1
    return Segmentation(
        tuple(kept), unsupervised, long, dropped, lost, overhead, supervised, clipped
    )


def split_rows(document: int, rows: int, rule: PackingRule) -> Pack:
    """Cut ``rows`` rows as drawn above; the own ranges cover every row exactly once.

    Raises:
        ConfigError: context and look-ahead leave no own row.
    """
    look_ahead = rule.steps - 1
    if rule.split_context_tokens + look_ahead >= rule.max_seq_len:
        raise ConfigError(
            f"data.split_context_tokens={rule.split_context_tokens} and {look_ahead} look-ahead "
            f"rows leave nothing of {rule.max_seq_len} rows (max_seq_len, or val.max_seq_len in "
            f"validation), but a document of {rows} rows must be split. Expected their sum below "
            "it: lower data.split_context_tokens or raise the limit."
        )
    segments = []
    own_start = 0
    while own_start < rows:
        start = max(own_start - rule.split_context_tokens, 0)
        stop = min(start + rule.max_seq_len, rows)
        own_stop = rows if stop == rows else stop - look_ahead
        segments.append(Segment(document, start, stop, own_start, own_stop))
        own_start = own_stop
    return tuple(segments)


def pack_epoch(
    documents: Sequence[Pack], max_seq_len: int, seed: int, epoch: int
) -> tuple[Pack, ...]:
    """The packs of an epoch in training order, from ``(seed, epoch)`` alone."""
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(documents)).tolist()
    packs: list[Pack] = []
    for i in range(0, len(order), WINDOW_DOCUMENTS):
        window = [s for d in order[i : i + WINDOW_DOCUMENTS] for s in documents[d]]
        packs += best_fit_decreasing(window, max_seq_len)
    return tuple(packs[i] for i in rng.permutation(len(packs)))


def best_fit_decreasing(segments: Iterable[Segment], capacity: int) -> list[Pack]:
    """Lay each segment, long ones first, into the fullest pack that has room for it."""
    packs: list[list[Segment]] = []
    with_room: dict[int, list[list[Segment]]] = {}
    rooms = 0  # bit r is set when some open pack has exactly r free rows
    for segment in sorted(segments, key=lambda s: s.rows, reverse=True):
        rows = segment.rows
        fitting = rooms >> rows
        if fitting:
            room = rows + (fitting & -fitting).bit_length() - 1
            pack = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, pack = capacity, []
            packs.append(pack)
        pack.append(segment)
        room -= rows
        if room:
            with_room.setdefault(room, []).append(pack)
            rooms |= 1 << room
    return [tuple(pack) for pack in packs]


def _cut(document: int, rows: int, gates: Runs, rule: PackingRule) -> Pack:
    """The segments of a long document that have a gated row."""
    match rule.long_documents:
        case LongDocuments.split:
            segments = split_rows(document, rows, rule)
        case LongDocuments.truncate:
            kept = rule.max_seq_len
            segments = (Segment(document, 0, kept, 0, kept),)
        case LongDocuments.drop:
            segments = ()
    return tuple(s for s in segments if gates.count(document, s.own_start, s.stop))
