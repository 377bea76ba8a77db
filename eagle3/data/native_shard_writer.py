"""A native shard that is being filled: every row has its place, whoever writes it and when."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Int
from numpy.typing import NDArray
from torch import Tensor

from eagle3.data.disk import write_error, write_fully
from eagle3.data.native_journal import Journal
from eagle3.data.native_shard import ShardLayout
from eagle3.data.scan import Part, scan
from eagle3.errors import DataError


class ShardWriter:
    """Fills one shard file; documents from several threads, each document from one at a time.

    Raises:
        DataError: from every method: the disk is full or refuses.
    """

    def __init__(
        self,
        number: int,
        path: Path,
        layout: ShardLayout,
        members: NDArray[np.int64],
        lengths: NDArray[np.int64],
        journal: Journal,
        missing_bytes: Callable[[], int],
    ) -> None:
        """Open the file, or make it with its final size; what the journal lists is compared.

        Args:
            number: Of the shard.
            path: Its temporary place.
            layout: Its sizes.
            members: Numbers of its documents.
            lengths: Their tokens.
            journal: Takes what is written.
            missing_bytes: Asked when the disk is full.
        """
        self.number, self.path, self.layout = number, path, layout
        self._lengths = dict(zip(members.tolist(), lengths.tolist(), strict=True))
        starts = (np.cumsum(lengths) - lengths).tolist()
        self._starts = dict(zip(members.tolist(), starts, strict=True))
        self._journal, self._missing_bytes = journal, missing_bytes
        self._missing = set(self._lengths)
        try:
            self._missing -= self._written_before()
            self._file = self._open()
        except OSError as error:
            raise self.error(error) from error

    @property
    def missing(self) -> tuple[int, ...]:
        """Documents that are not written yet, ascending."""
        return tuple(sorted(self._missing))

    def document(self, document: int) -> DocumentWriter:
        """Where the rows of one of the missing documents go."""
        return DocumentWriter(self, document, self._starts[document], self._lengths[document])

    def write(self, content: memoryview, offset: int) -> None:
        """Put bytes at a place of the file."""
        try:
            write_fully(self._file, content, offset)
        except OSError as error:
            raise self.error(error) from error

    def add(self, document: int, crc32: tuple[int, int, int, int]) -> None:
        """Note that all bytes of a document are written."""
        try:
            self._journal.add_sample(document, crc32)
        except OSError as error:
            raise self.error(error) from error
        self._missing.discard(document)

    def close(self, *, sync: bool) -> None:
        """Close the file; with ``sync`` the disk has its bytes, and memory forgets them."""
        try:
            if sync:
                os.fsync(self._file)
                os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self.error(error) from error
        finally:
            os.close(self._file)

    def parts(self, documents: list[int]) -> list[Part]:
        """The bytes of some documents of the journal, with their checksums, tensor by tensor."""
        listed = self._journal.content.samples
        ranges = [self.layout.ranges(self._starts[d], self._lengths[d]) for d in documents]
        return [
            Part(*of[tensor], crc32=listed[document][tensor])
            for tensor in range(4)
            for document, of in zip(documents, ranges, strict=True)
        ]

    def error(self, error: OSError) -> DataError:
        """What to say when the disk refuses."""
        return write_error(self.path, error, self._missing_bytes())

    def _written_before(self) -> set[int]:
        """Documents of the journal whose bytes are in the file."""
        if not has_shape(self.path, self.layout):
            return set()
        listed = [d for d in self._lengths if d in self._journal.content.samples]
        faults = scan(self.path, self.parts(listed))
        damaged = {listed[place % len(listed)] for place, fault in enumerate(faults) if fault}
        return set(listed) - damaged

    def _open(self) -> int:
        renew = 0 if has_shape(self.path, self.layout) else os.O_TRUNC
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | renew, 0o644)
        try:
            if renew:
                os.ftruncate(file, self.layout.num_bytes)
                write_fully(file, memoryview(self.layout.header), 0)
        except BaseException:
            os.close(file)
            raise
        return file


class DocumentWriter:
    """Writes one document: its rows in order, then its ids and mask."""

    def __init__(self, shard: ShardWriter, document: int, start: int, length: int) -> None:
        self._shard, self._document = shard, document
        self._start, self._length, self._done = start, length, 0
        self._crc32 = [0, 0, 0, 0]

    def rows(self, aux_hidden: Tensor, last_hidden: Tensor) -> None:
        """The next m rows: [m, K*H] and [m, H] in the dtype of the shard."""
        states, dtype = self._shard.layout.states, getattr(torch, self._shard.layout.dtype)
        count = aux_hidden.shape[0]
        assert aux_hidden.shape == (count, states.aux_width)
        assert last_hidden.shape == (count, states.hidden_size)
        assert aux_hidden.dtype == last_hidden.dtype == dtype
        for tensor, values in enumerate((aux_hidden, last_hidden)):
            self._write(tensor, self._done, values)
        self._done += count

    def close(self, input_ids: Int[Tensor, " N"], loss_mask: Bool[Tensor, " N"]) -> None:
        """The last bytes of the document; from here on it counts as written."""
        assert self._done == len(input_ids) == len(loss_mask) == self._length
        self._write(2, 0, input_ids.to(torch.int64))
        self._write(3, 0, loss_mask.to(torch.uint8))
        a, b, c, d = self._crc32
        self._shard.add(self._document, (a, b, c, d))

    def _write(self, tensor: int, row: int, values: Tensor) -> None:
        content = memoryview(values.contiguous().view(torch.uint8).numpy().data).cast("B")
        self._crc32[tensor] = zlib.crc32(content, self._crc32[tensor])
        first, _ = self._shard.layout.ranges(self._start + row, 0)[tensor]
        self._shard.write(content, first)


def has_shape(path: Path, layout: ShardLayout) -> bool:
    """Whether a file has the size and the header of a shard."""
    try:
        with path.open("rb") as file:
            return (
                os.fstat(file.fileno()).st_size == layout.num_bytes
                and file.read(len(layout.header)) == layout.header
            )
    except FileNotFoundError:
        return False
