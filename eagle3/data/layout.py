"""Sizes of the stored states, and how a format lays them out.

A token has ``(K + 1) * H`` values: K aux states, low layer first, then the last state. A format
stores them as one or more *planes*, each a run of columns of all tokens of a document, row by row::

    columns            0 .. H   H .. 2H   2H .. 3H   3H .. 4H        (K = 3)
    speculators v1     plane 0  plane 1   plane 2    plane 3         K + 1 tensors [n, H]
    native             plane 0 ...................   plane 1         aux [T, K*H], last [T, H]
    speculators 0.9    plane 0 .............................         one tensor [n, K + 1, H]

So the bytes of tokens ``[a, b)`` of a plane are one range of a file.
"""

from __future__ import annotations

from dataclasses import dataclass

from eagle3.errors import DataError


class LayoutError(DataError):
    """The states have other sizes than the config says; in the first file, a config mistake."""


@dataclass(frozen=True)
class StateLayout:
    """Sizes that every document of a directory must have."""

    num_aux_layers: int
    """K"""
    hidden_size: int
    """H"""
    vocab_size: int
    """Of the verifier; token ids are below it."""

    @property
    def aux_width(self) -> int:
        """K * H"""
        return self.num_aux_layers * self.hidden_size

    @property
    def width(self) -> int:
        """(K + 1) * H"""
        return self.aux_width + self.hidden_size

    @property
    def aux(self) -> Plane:
        """The columns of the aux states."""
        return Plane(0, self.aux_width)

    @property
    def last(self) -> Plane:
        """The columns of the last state."""
        return Plane(self.aux_width, self.width)


@dataclass(frozen=True)
class Plane:
    """Columns ``[first, stop)`` of the values of a token."""

    first: int
    stop: int

    @property
    def width(self) -> int:
        """Values per token."""
        return self.stop - self.first

    def overlap(self, other: Plane) -> Plane | None:
        """The columns that both have."""
        first, stop = max(self.first, other.first), min(self.stop, other.stop)
        return Plane(first, stop) if first < stop else None
