"""PackedBatch: documents laid end to end, shifted once, padded to a fixed length.

The shift, drawn for one document of n = 5 tokens (x tokens, g aux states, y last states, l mask)::

    token index      0    1    2    3    4
    row              0    1    2    3          n - 1 = 4 rows
    input_ids       x1   x2   x3   x4          the token a server feeds next
    aux_hidden      g0   g1   g2   g3          what the verifier knew before it
    last_hidden     y1   y2   y3   y4          gives p(.|y_{i+1}), the prediction of x_{i+2}
    loss_mask       l1   l2   l3   l4          gate: is x_{i+1} a response token?
    next_ids        x2   x3   x4   -1          x_{i+2} as the data have it
    position_ids     0    1    2    3

At TTT step s row i reads ``input_ids``, ``last_hidden`` and ``loss_mask`` of row i + s, so it
exists only while i + s is a row of the same document: 4, 3, 2 rows at steps 0, 1, 2 here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from eagle3.dims import AuxHidden, Hidden, RowMask, TokenIds


@dataclass(frozen=True)
class PackedBatch:
    """One pack of rows; padding sits at the end. All tensors share the row axis T.

    A long document may come in several segments; each is a document of its own here, with rows
    that give keys or targets only (``start_mask`` false) so that no supervised row is lost.
    """

    input_ids: TokenIds
    """int64, token x_{i+1} of row i in the verifier vocabulary; 0 on padding."""
    next_ids: TokenIds
    """int64, token x_{i+2}; -1 where the document ends or on padding."""
    aux_hidden: AuxHidden
    """Concatenated aux states g_i, low layer first, in the capture's dtype."""
    last_hidden: Hidden
    """Last state y_{i+1}, in the capture's dtype; pre- or post-norm as the data declare."""
    loss_mask: RowMask
    """bool, gate l_{i+1}."""
    document_ids: TokenIds
    """int64, index of the segment within the pack; -1 on padding."""
    position_ids: TokenIds
    """int64, position of row i in its document (from 0, kept across splits); 0 on padding."""
    start_mask: RowMask
    """bool, rows whose draft chain is trained here; false on context, look-ahead and padding."""
    document_lengths: tuple[int, ...]
    """Length in tokens of the whole document each segment comes from (for metrics by length)."""
    document_sources: tuple[str, ...] = ()
    """Label of where the document of each segment came from; empty: nobody asked."""
    epoch: int = 0
    index: int = 0
    """Place in the epoch's plan; (seed, epoch, index) seeds the noise of this pack."""

    @classmethod
    def of_rows(cls, input_ids: Tensor, aux_hidden: Tensor) -> PackedBatch:
        """The rows [T] of one document that a drafter unrolls over; nothing judges them.

        Args:
            input_ids: int64 [T], token x_{i+1} of row i.
            aux_hidden: [T, K*H], states g_i.
        """
        length, device = len(input_ids), input_ids.device
        return cls(
            input_ids=input_ids,
            next_ids=torch.full_like(input_ids, -1),
            aux_hidden=aux_hidden,
            last_hidden=torch.zeros(length, 1, device=device),
            loss_mask=torch.ones(length, dtype=torch.bool, device=device),
            document_ids=torch.zeros_like(input_ids),
            position_ids=torch.arange(length, device=device),
            start_mask=torch.ones(length, dtype=torch.bool, device=device),
            document_lengths=(length + 1,),
        )

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def num_rows(self) -> int:
        """Rows before the padding."""
        return int((self.document_ids >= 0).sum())

    def trim(self) -> PackedBatch:
        """Drop the padding, so that nothing in it can reach a result."""
        end = self.num_rows
        tensors = {
            f.name: getattr(self, f.name)[:end]
            for f in fields(self)
            if isinstance(getattr(self, f.name), Tensor)
        }
        return replace(self, **tensors)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedBatch:
        """Move every tensor; the dtype of hidden states is kept (casts happen on the device)."""
        tensors = {
            f.name: getattr(self, f.name).to(device, non_blocking=non_blocking)
            for f in fields(self)
            if isinstance(getattr(self, f.name), Tensor)
        }
        return replace(self, **tensors)


@dataclass(frozen=True)
class Window:
    """What one rank does in one optimizer step: one pack per accumulation step.

    A pack may be empty (all padding) where the last window of an epoch has fewer packs than
    ranks x accumulation steps.
    """

    packs: tuple[PackedBatch, ...]
    step: int
    """Index of the window in its epoch."""
    bad_samples: tuple[str, ...] = ()
    """One line per sample of this window that was skipped, naming file and reason."""
    wait_s: float = 0.0
    """Seconds the training loop waited for this window."""
    read_bytes: int = 0
    """Bytes of hidden states read for it."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Window:
        """Move all packs."""
        return replace(self, packs=tuple(p.to(device, non_blocking) for p in self.packs))
