"""Where documents begin among the rows of a pack, and which of the rows ask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

_JOINED_GAP_ROWS = 32
"""Query rows that lie nearer share a span: its unasked rows cost less than another call."""


class Span(NamedTuple):
    """Rows ``first:stop`` of one document; among them the query rows of ``columns``."""

    document_start: int
    """First row of the document."""
    first: int
    stop: int
    columns: slice
    """Place among all query rows."""
    offsets: tuple[int, ...] | None
    """Rows that ask, counted from ``first``; None: all of the span."""


@dataclass(frozen=True)
class DocumentLayout:
    """Documents among L rows laid end to end, and the A rows that ask.

    ::

        rows         0 1 2 3 4 5 6 | 7 8 9        two documents: row_starts (0, 7, 10)
        query_rows       2 3   5 6     8          spans: rows 2..6 (row 4 does not ask), row 8
        column           0 1   2 3     4          of queries, outputs and own-column keys
    """

    row_starts: tuple[int, ...]
    """Boundaries, one more than documents: rows ``row_starts[d]:row_starts[d + 1]`` are document d.
    ``(0,)`` stands for no rows."""
    query_rows: Int[Tensor, " A"] | None = field(default=None, compare=False)
    """Rows that ask, increasing; None: all."""

    def __post_init__(self) -> None:
        assert self.row_starts[0] == 0, "the first document starts at row 0"
        assert all(a < b for a, b in pairwise(self.row_starts)), "documents have at least one row"

    @classmethod
    def from_document_ids(
        cls, document_ids: Int[Tensor, " L"], query_rows: Int[Tensor, " A"] | None = None
    ) -> DocumentLayout:
        """Boundaries of runs of equal ids; no padding, and each document in one run."""
        ids = document_ids.tolist()
        starts = [i for i, document in enumerate(ids) if i == 0 or document != ids[i - 1]]
        runs = [ids[i] for i in starts]
        assert all(document >= 0 for document in runs), "padding rows must be trimmed"
        assert len(set(runs)) == len(runs), "the rows of a document must be contiguous"
        return cls((*starts, len(ids)) if ids else (0,), query_rows)

    @property
    def rows(self) -> int:
        """L"""
        return self.row_starts[-1]

    @property
    def queries(self) -> int:
        """A"""
        return self.rows if self.query_rows is None else self.query_rows.shape[0]

    @property
    def longest(self) -> int:
        """Rows of the longest document."""
        return max((stop - start for start, stop in pairwise(self.row_starts)), default=0)

    def asking(self, device: torch.device) -> Int[Tensor, " A"]:
        """The rows that ask."""
        if self.query_rows is None:
            return torch.arange(self.rows, device=device)
        return self.query_rows.to(device)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Spans that hold all query rows, in order; none crosses a document."""
        if self.query_rows is None:
            return tuple(
                Span(start, start, stop, slice(start, stop), None)
                for start, stop in pairwise(self.row_starts)
            )
        return tuple(self._near_rows(self.query_rows.tolist()))

    def _near_rows(self, asking: list[int]) -> Iterator[Span]:
        starts = iter(self.row_starts)
        document_start, document_stop, begin = 0, next(starts), 0
        for place, row in enumerate(asking):
            while row >= document_stop:
                document_start, document_stop = document_stop, next(starts)
            last = place + 1 == len(asking)
            if last or asking[place + 1] >= min(document_stop, row + 1 + _JOINED_GAP_ROWS):
                first = asking[begin]
                offsets = tuple(each - first for each in asking[begin : place + 1])
                gapless = len(offsets) == row + 1 - first
                columns = slice(begin, place + 1)
                yield Span(document_start, first, row + 1, columns, None if gapless else offsets)
                begin = place + 1
