"""Memory for states: aligned to pages, in huge pages, and used again.

Memory fresh from the system costs a page fault for every 4 KB, some 57,000 for a pack of 235 MB,
and writing into it is several times slower than into memory that was used before. So a buffer goes
back to its pool when the last tensor that views it is gone, and the next pack gets it::

    pool ── empty() ──► loan (an array object) ◄── tensor ◄── views, slices, trim()
      ▲                   │
      └── the buffer ◄────┘ when the loan is collected

PyTorch keeps the very array object of ``torch.from_numpy`` alive as long as the storage has users.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections import deque
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_HUGE_PAGE = 2 << 20


class HostMemory(Protocol):
    """Where packs are allocated."""

    pinned: bool
    """Page-locked, for asynchronous copies to a CUDA device."""

    def empty(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """[rows, width], uninitialised, contiguous."""


class BufferPool:
    """Pageable memory that is used again. Safe to use from several threads.

    When the pool itself is dropped, each buffer goes with its last tensor.
    """

    pinned = False

    def __init__(self) -> None:
        self._free: dict[int, deque[NDArray[np.uint8]]] = {}

    def empty(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """See :meth:`HostMemory.empty`."""
        size = rows * width * dtype.itemsize
        # No lock: a collected loan may come back in any thread, also in the middle of this call.
        free = self._free.setdefault(size, deque())
        try:
            buffer = free.pop()
        except IndexError:
            buffer = huge_pages(size)
        loan = buffer[:]
        weakref.finalize(loan, free.append, buffer).atexit = False
        return torch.from_numpy(loan).view(dtype).view(rows, width)


class PinnedMemory:
    """Page-locked memory; PyTorch's own allocator uses it again."""

    pinned = True

    def empty(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """See :meth:`HostMemory.empty`."""
        return torch.empty(rows, width, dtype=dtype, pin_memory=True)


def huge_pages(size: int) -> NDArray[np.uint8]:
    """``size`` bytes that start on a huge page; the system gives real memory when it is touched.

    Huge pages are few segments for a disk that writes into them: direct reads into them measured
    three times as fast as into small pages.
    """
    whole_pages = -(-size // _HUGE_PAGE) * _HUGE_PAGE
    # Private: the default, shared memory, gets no huge pages.
    memory = mmap.mmap(-1, whole_pages + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    skipped = -whole.ctypes.data % _HUGE_PAGE
    return whole[skipped : skipped + size]
