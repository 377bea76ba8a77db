"""Byte ranges of documents, straight into the tensors that wait for them.

What is wanted is said by targets: columns and tokens of a document, and where they go. Only planes
and token ranges that some target needs are read, each byte once, in pieces of a few MB that
different threads can read::

    tokens of a plane   0 1 2 3 4 5 6 7 8 9
    targets               o o o     o o         o wanted
    one range             |---piece-|-piece-|   a short gap is read too, but goes nowhere

A piece is checked for NaN and inf while it is in the processor's cache. Only what is wanted is
checked: a NaN in a row that nobody reads is no error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from eagle3.data.byte_reader import BufferedReader, ByteReader, IndexedFile
from eagle3.data.hashing import hash_ids
from eagle3.data.index import DocumentIndex
from eagle3.data.layout import Plane, StateLayout
from eagle3.data.read_mode import choose_reader
from eagle3.data.sample import Sample
from eagle3.data.store import Store
from eagle3.errors import DataError
from eagle3.names import ReadMode

PIECE_BYTES = 4 << 20
"""Large enough for a disk to be fast, small enough for the cache and for several threads to share
the work on one pack."""
_GAP_BYTES = 128 << 10
"""Reading so much too much costs no more than another read."""
_EXPONENTS = {
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float32: 0x7F80_0000,
    torch.float64: 0x7FF0_0000_0000_0000,
}
"""Bits of the exponent; NaN and inf have them all."""
_FREE = nullcontext()
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Target:
    """Where the states of some tokens go."""

    columns: Plane
    start: int
    """First token."""
    out: Tensor
    """[m, width of columns] in the dtype of the states, any row stride; the m tokens from
    ``start``."""

    @property
    def stop(self) -> int:
        """The token after the last."""
        return self.start + self.out.shape[0]


class _Wanted(NamedTuple):
    """Some tokens and columns of a plane, and where they go; all of the plane's columns count
    from its first one."""

    start: int
    stop: int
    columns: slice
    out: NDArray[Any]
    """[stop - start, columns], the bits of the states as integers."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of a plane of one document: one read."""

    reader: StateReader
    document: int
    plane: int
    start: int
    stop: int
    wanted: tuple[_Wanted, ...]

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return (self.stop - self.start) * self.reader.row_bytes(self.plane)

    def read(self, disk: AbstractContextManager[object] = _FREE) -> int:
        """Read it to where it is wanted, holding ``disk`` while the disk works; returns the bytes
        read.

        Raises:
            DataError: the file cannot be read, or NaN or inf among the wanted states.
        """
        reader, width = self.reader, self.reader.planes[self.plane].width
        file = reader.files[int(reader.index.file[self.document])]
        offset = int(reader.index.state_offsets[self.document, self.plane])
        offset += self.start * reader.row_bytes(self.plane)
        out = self.wanted[0].out
        straight = len(self.wanted) == 1 and out.shape[1] == width and out.flags.c_contiguous
        if straight:
            with disk:
                reader.bytes.read_into(file, offset, out.reshape(-1).view(np.uint8))
            self._check(self.start, out)
            return self.nbytes
        with disk:
            content = reader.bytes.read(file, offset, self.nbytes)
        rows = content.view(out.dtype).reshape(-1, width)
        for wanted in self.wanted:
            found = rows[wanted.start - self.start : wanted.stop - self.start, wanted.columns]
            self._check(wanted.start, found)
            np.copyto(wanted.out, found)
        return self.nbytes

    def _check(self, start: int, bits: NDArray[Any]) -> None:
        exponent = _EXPONENTS[self.reader.index.dtype]
        if all_finite(bits, exponent):
            return
        bad = np.flatnonzero(((bits & exponent) == exponent).any(axis=1))
        raise DataError(
            f"{self.reader.path(self.document)}: key 'hidden_states': found NaN or inf in "
            f"{len(bad)} of the tokens {start}..{start + len(bits) - 1}, the first is token "
            f"{start + int(bad[0])}; expected finite states. Capture the sample again."
        )


class StateReader:
    """Reads the documents of one directory. Safe to use from several threads."""

    def __init__(
        self, store: Store, index: DocumentIndex, byte_reader: ByteReader | None = None
    ) -> None:
        """Remember the sizes of the files; from now on, one of another size is refused.

        ``byte_reader`` None: buffered.
        """
        self.directory: Path = store.directory
        self.layout: StateLayout = store.layout
        self.planes = store.planes
        self.index = index
        self.files = indexed_files(store, index)
        self.bytes: ByteReader = BufferedReader() if byte_reader is None else byte_reader

    @classmethod
    def open(
        cls, store: Store, index: DocumentIndex, mode: ReadMode, num_threads: int
    ) -> StateReader:
        """A reader that reads as ``mode`` says, in ``num_threads`` threads at once."""
        return cls(store, index, choose_reader(mode, indexed_files(store, index), num_threads))

    def path(self, document: int) -> Path:
        """The file that holds a document."""
        return self.directory / self.index.file_name(document)

    def row_bytes(self, plane: int) -> int:
        """Bytes of a token in a plane."""
        return self.planes[plane].width * self.index.dtype.itemsize

    def input_ids(self, document: int) -> Int[Tensor, " N"]:
        """int64, all token ids, compared with the hash in the index.

        Raises:
            DataError: the file cannot be read, or is not the one that was indexed.
        """
        index = self.index
        itemsize, length = int(index.ids_bytes[document]), int(index.lengths[document])
        file = self.files[int(index.file[document])]
        content = self.bytes.read(file, int(index.ids_offset[document]), itemsize * length)
        ids = content.view(f"<u{itemsize}")  # of any integer type, for they are not negative
        if hash_ids(ids) != int(index.sample_hash[document]):
            raise DataError(
                f"{file.path}: found other token ids than when the directory was indexed: the file "
                "was replaced or is damaged. Start again; if that does not help, capture it again."
            )
        return torch.from_numpy(ids.astype(np.int64))

    def pieces(self, document: int, targets: Sequence[Target]) -> list[Piece]:
        """What to read to fill the targets; any order and any thread will do."""
        bits = [_bits(target.out, self.index.dtype) for target in targets]
        found = []
        for number, plane in enumerate(self.planes):
            wanted = sorted(
                _of_plane(targets, bits, plane), key=lambda part: (part.start, part.stop)
            )
            for start, stop, near in _ranges(wanted, _GAP_BYTES // self.row_bytes(number)):
                rows = max(PIECE_BYTES // self.row_bytes(number), 1)
                count = -(-(stop - start) // rows)  # pieces of equal size
                for part in range(count):
                    first = start + (stop - start) * part // count
                    last = start + (stop - start) * (part + 1) // count
                    if inside := tuple(_clip(near, first, last)):
                        ends = inside[0].start, max(each.stop for each in inside)
                        found.append(Piece(self, document, number, *ends, inside))
        return found

    def read(self, document: int, targets: Sequence[Target]) -> int:
        """Fill the targets; returns the bytes read.

        Raises:
            DataError: the file cannot be read, or NaN or inf among the states.
        """
        return sum(piece.read() for piece in self.pieces(document, targets))

    def sample(self, document: int, start: int = 0, stop: int | None = None) -> Sample:
        """A document with the states of tokens ``[start, stop)`` in tensors of their own; gates as
        captured.

        Raises:
            DataError: as :meth:`input_ids` and :meth:`read`.
        """
        ids = self.input_ids(document)
        stop = len(ids) if stop is None else stop
        aux = torch.empty(stop - start, self.layout.aux_width, dtype=self.index.dtype)
        last = torch.empty(stop - start, self.layout.hidden_size, dtype=self.index.dtype)
        targets = [Target(self.layout.aux, start, aux), Target(self.layout.last, start, last)]
        self.read(document, targets)
        mask = torch.from_numpy(self.index.runs.mask(document, len(ids)))
        return Sample(ids, mask, aux, last)


def indexed_files(store: Store, index: DocumentIndex) -> tuple[IndexedFile, ...]:
    """The files of ``index`` as they are now."""
    return tuple(IndexedFile.at(store.directory / name) for name in index.files)


def all_finite(bits: NDArray[Any], exponent: int) -> bool:
    """Whether no float has all bits of ``exponent``; ``bits`` are the floats as integers.

    As signed integers the positive NaN and inf are the largest, as unsigned ones the negative. Two
    maxima need no memory, and are twice as fast as the test of the exponent in numpy or torch.
    """
    if not bits.size:
        return True
    size = bits.itemsize
    sign = 1 << (8 * size - 1)
    return (
        int(bits.view(f"i{size}").max()) < exponent
        and int(bits.view(f"u{size}").max()) < sign | exponent
    )


def _bits(out: Tensor, dtype: torch.dtype) -> NDArray[Any]:
    assert out.dtype == dtype, "states are copied as they are stored"
    found: NDArray[Any] = out.view(_INTEGERS[dtype.itemsize]).numpy()
    return found


def _of_plane(
    targets: Sequence[Target], bits: Sequence[NDArray[Any]], plane: Plane
) -> Iterator[_Wanted]:
    """What each target wants of a plane."""
    for target, out in zip(targets, bits, strict=True):
        both = plane.overlap(target.columns)
        if both is None or target.start == target.stop:
            continue
        origin = target.columns.first
        yield _Wanted(
            target.start,
            target.stop,
            slice(both.first - plane.first, both.stop - plane.first),
            out[:, both.first - origin : both.stop - origin],
        )


def _ranges(
    wanted: Sequence[_Wanted], largest_gap: int
) -> Iterator[tuple[int, int, list[_Wanted]]]:
    """Tokens to read at once, and what of them is wanted; ``wanted`` is sorted."""
    near: list[_Wanted] = []
    stop = 0
    for part in wanted:
        if near and part.start > stop + largest_gap:
            yield near[0].start, stop, near
            near = []
        stop = max(stop, part.stop) if near else part.stop
        near.append(part)
    if near:
        yield near[0].start, stop, near


def _clip(wanted: Sequence[_Wanted], start: int, stop: int) -> Iterator[_Wanted]:
    """What is wanted of tokens ``[start, stop)``."""
    for part in wanted:
        first, last = max(part.start, start), min(part.stop, stop)
        if first < last:
            out = part.out[first - part.start : last - part.start]
            yield _Wanted(first, last, part.columns, out)
