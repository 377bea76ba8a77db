"""Segments of documents and packs of segments, as arrays.

A million documents are a million small objects, or a few arrays of 4 MB each. Only the arrays are
kept; a :class:`Pack` of :class:`Segment` objects is made when somebody asks for it::

    table     document   0 0 1 2 2          five segments of three documents
              start      0 4 0 0 4
              ...
    packs     order      2 0 | 1 4 | | 3    places in the table, pack after pack
              offsets    0     2   4 4   5  four packs, the third one empty
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray


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


@dataclass(frozen=True, eq=False)
class SegmentTable:
    """S segments, one array [S] int32 for each field of :class:`Segment`."""

    document: NDArray[np.int32]
    start: NDArray[np.int32]
    stop: NDArray[np.int32]
    own_start: NDArray[np.int32]
    own_stop: NDArray[np.int32]
    supervised: NDArray[np.int32]
    """Gated rows in which a chain starts."""

    def __len__(self) -> int:
        return len(self.document)

    @property
    def rows(self) -> NDArray[np.int64]:
        """Rows of each segment, [S]."""
        return (self.stop - self.start).astype(np.int64)

    @property
    def own_rows(self) -> NDArray[np.int64]:
        """Rows of each segment in which a chain starts, [S]."""
        return (self.own_stop - self.own_start).astype(np.int64)

    def take(self, places: NDArray[np.int64] | NDArray[np.bool_]) -> SegmentTable:
        """The segments at ``places``, or those that a mask [S] chooses."""
        return SegmentTable(*(column[places] for column in self.columns()))

    def columns(self) -> tuple[NDArray[np.int32], ...]:
        """All arrays, in the order of the fields."""
        return tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, eq=False)
class Packs:
    """N groups of segments: the packs of an epoch, or the documents that packs are made of.

    A sequence of :class:`Pack`. Equal when the packs are, however the tables are sorted.
    """

    table: SegmentTable
    order: NDArray[np.int64]
    """Places in ``table`` of the laid segments, group after group."""
    offsets: NDArray[np.int64]
    """[N + 1]: group i has ``order[offsets[i]:offsets[i + 1]]``."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Pack:
        if not 0 <= index < len(self):
            raise IndexError(f"pack {index}: found {len(self)} packs")
        places = self.order[self.offsets[index] : self.offsets[index + 1]]
        columns = (column[places].tolist() for column in self.table.columns()[:-1])
        return tuple(map(Segment, *columns))

    def __iter__(self) -> Iterator[Pack]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Packs):
            return NotImplemented
        pairs = zip(self.arrays(), other.arrays(), strict=True)
        return all(np.array_equal(ours, theirs) for ours, theirs in pairs)

    __hash__ = None  # type: ignore[assignment]

    @property
    def rows(self) -> NDArray[np.int64]:
        """Rows laid in each pack, [N]."""
        return self.sums(self.table.rows)

    @property
    def supervised(self) -> NDArray[np.int64]:
        """Gated rows of each pack in which a chain starts, [N]."""
        return self.sums(self.table.supervised)

    @property
    def documents(self) -> NDArray[np.int64]:
        """Documents of which something is laid, each once, ascending."""
        return np.unique(self.table.document[self.order]).astype(np.int64)

    def select(self, indices: NDArray[np.int64]) -> Packs:
        """The packs ``indices``, in that order; one may come more than once."""
        sizes = np.diff(self.offsets)[indices]
        offsets = offsets_of(sizes)
        inside = np.arange(offsets[-1]) - np.repeat(offsets[:-1], sizes)
        return Packs(
            self.table, self.order[np.repeat(self.offsets[indices], sizes) + inside], offsets
        )

    def sums(self, values: NDArray[np.signedinteger]) -> NDArray[np.int64]:
        """Sum of ``values`` [S], one a segment of the table, over each pack: [N]."""
        cumulated = offsets_of(values[self.order])
        return cumulated[self.offsets[1:]] - cumulated[self.offsets[:-1]]

    def arrays(self) -> tuple[NDArray[np.signedinteger], ...]:
        """All that defines the packs, whatever the order of the table."""
        return self.offsets, *self.table.take(self.order).columns()


def offsets_of(sizes: NDArray[np.signedinteger] | NDArray[np.bool_]) -> NDArray[np.int64]:
    """[N + 1]: where each of N groups of ``sizes`` [N] starts, and where the last one ends."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets
