"""How a native shard lies on disk: one safetensors file whose places follow from its sizes alone.

::

    byte 0     8      header          a multiple of 4096
    | length | JSON, padded with spaces | aux_hidden [T, K*H] | last_hidden [T, H] |
                                        | input_ids int64 [T] | loss_mask uint8 [T] |

The documents of a shard lie end to end, in every tensor in the same order, so a document is one
range of each. The aux states begin on a page, for reads that bypass the page cache.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property

import torch

from eagle3.data.layout import StateLayout

DTYPE_CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
"""Names in torch and in safetensors."""
TENSORS = ("aux_hidden", "last_hidden", "input_ids", "loss_mask")
"""In the order of the file, of a sample's checksums and of :meth:`ShardLayout.row_bytes`."""
ID_BYTES = 8
_PAGE = 4096


@dataclass(frozen=True)
class ShardLayout:
    """Places in a shard of ``rows`` tokens."""

    states: StateLayout
    dtype: str
    """Of the states, a key of :data:`DTYPE_CODES`."""
    rows: int
    """T, tokens of all documents of the shard."""

    @property
    def row_bytes(self) -> tuple[int, int, int, int]:
        """Bytes of a token in each tensor."""
        return row_bytes(self.states, self.dtype)

    @cached_property
    def header(self) -> bytes:
        """All bytes before the first tensor."""
        shapes = (
            [self.rows, self.states.aux_width],
            [self.rows, self.states.hidden_size],
            [self.rows],
            [self.rows],
        )
        code = DTYPE_CODES[self.dtype]
        content: dict[str, object] = {"__metadata__": {"format": "pt"}}
        start = 0
        columns = zip(TENSORS, (code, code, "I64", "U8"), shapes, self.row_bytes, strict=True)
        for name, dtype, shape, size in columns:
            stop = start + self.rows * size
            content[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
            start = stop
        text = json.dumps(content, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % _PAGE)
        return len(text).to_bytes(8, "little") + text

    @cached_property
    def starts(self) -> tuple[int, int, int, int]:
        """Byte of the first token in each tensor."""
        at = len(self.header)
        aux, last, ids, _ = (self.rows * size for size in self.row_bytes)
        return at, at + aux, at + aux + last, at + aux + last + ids

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self.header) + self.rows * sum(self.row_bytes)

    def ranges(self, start: int, length: int) -> tuple[tuple[int, int], ...]:
        """Bytes ``(first, stop)`` of the tokens ``[start, start + length)`` in each tensor."""
        return tuple(
            (at + start * size, at + (start + length) * size)
            for at, size in zip(self.starts, self.row_bytes, strict=True)
        )


def row_bytes(states: StateLayout, dtype: str) -> tuple[int, int, int, int]:
    """Bytes of a token in ``aux_hidden``, ``last_hidden``, ``input_ids`` and ``loss_mask``."""
    itemsize = int(getattr(torch, dtype).itemsize)
    return states.aux_width * itemsize, states.hidden_size * itemsize, ID_BYTES, 1


def token_bytes(states: StateLayout, dtype: str) -> int:
    """Bytes of a token in a native directory, headers left out."""
    return sum(row_bytes(states, dtype))
