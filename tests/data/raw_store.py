"""Documents in one file of raw numbers, with planes and places as a test wants them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eagle3.data.declaration import StoredDeclaration
from eagle3.data.hashing import hash_ids
from eagle3.data.index import DocumentIndex, index_records
from eagle3.data.layout import Plane, StateLayout
from eagle3.data.store import DocumentRecord

LAYOUT = StateLayout(num_aux_layers=3, hidden_size=4, vocab_size=50)
PLANES = {
    "a plane a layer": (Plane(0, 4), Plane(4, 8), Plane(8, 12), Plane(12, 16)),
    "aux and last": (Plane(0, 12), Plane(12, 16)),
    "one plane": (Plane(0, 16),),
}


@dataclass(frozen=True)
class RawStore:
    """A store whose index is made by :func:`write_raw`."""

    directory: Path
    planes: tuple[Plane, ...]
    layout: StateLayout = LAYOUT
    files: tuple[str, ...] = ("raw",)
    side_files: tuple[Path, ...] = ()

    def declaration(self) -> StoredDeclaration:
        raise NotImplementedError

    def probe(self, file: str) -> Sequence[DocumentRecord]:
        raise NotImplementedError


def write_raw(
    directory: Path, documents: Sequence[Tensor], planes: tuple[Plane, ...], start: int = 0
) -> tuple[RawStore, DocumentIndex]:
    """Each document is all its values [n, 16]; the file begins with ``start`` other bytes.

    Token j of every document has id j.
    """
    content, records = bytearray(b"\xff" * start), []
    for values in documents:
        ids = np.arange(len(values))
        ids_offset = len(content)
        content += ids.tobytes()
        offsets = []
        for plane in planes:
            offsets.append(len(content))
            part = values[:, plane.first : plane.stop].contiguous()
            content += part.view(torch.uint8).numpy().tobytes()
        records.append(
            DocumentRecord(
                file="raw",
                length=len(values),
                runs=np.array([[0, len(values)]]),
                sample_hash=hash_ids(ids),
                prompt_hash=0,
                dtype=str(values.dtype).removeprefix("torch."),
                ids_offset=ids_offset,
                ids_bytes=8,
                state_offsets=tuple(offsets),
            )
        )
    (directory / "raw").write_bytes(content)
    return RawStore(directory, planes), index_records(records)
