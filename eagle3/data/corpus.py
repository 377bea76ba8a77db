"""All documents a run reads, from one directory or several, under one numbering."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from eagle3.data.index import ShardDescription
from eagle3.data.layout import StateLayout
from eagle3.data.masks import Runs
from eagle3.data.reading import Piece, Target
from eagle3.data.shards import Shards
from eagle3.errors import DataError


@dataclass(frozen=True, eq=False)
class Corpus:
    """D documents: those of the first directory, then those of the second, and so on."""

    parts: tuple[Shards, ...]
    first: NDArray[np.int64]
    """[parts + 1], number of each part's first document."""
    lengths: NDArray[np.int64]
    """[D], tokens."""
    runs: Runs
    """Supervised tokens under ``train_on``."""
    gates: Runs
    """The rows they gate."""
    sample_hash: NDArray[np.uint64]
    """[D]"""
    prompt_hash: NDArray[np.uint64]
    """[D]"""
    sources: tuple[str, ...]
    """Labels of the documents, sorted."""
    source: NDArray[np.int64]
    """[D], place in ``sources``."""

    @classmethod
    def join(cls, parts: Sequence[Shards]) -> Corpus:
        """Put directories of the same kind of states one after another.

        Raises:
            DataError: they hold other layers, another last state, or another dtype.
        """
        for part in parts[1:]:
            check_same_states(parts[0], part)
        labels = [np.array(part.sources, np.str_)[part.source] for part in parts]
        sources, source = np.unique(np.concatenate(labels), return_inverse=True)
        runs = Runs.concatenate([part.runs for part in parts])
        return cls(
            parts=tuple(parts),
            first=np.cumsum([0, *(len(part.index) for part in parts)], dtype=np.int64),
            lengths=np.concatenate([part.index.lengths for part in parts]),
            runs=runs,
            gates=runs.gated_rows(),
            sample_hash=np.concatenate([part.index.sample_hash for part in parts]),
            prompt_hash=np.concatenate([part.index.prompt_hash for part in parts]),
            sources=tuple(sources.tolist()),
            source=source.astype(np.int64),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def layout(self) -> StateLayout:
        """Sizes of the states."""
        return self.parts[0].reader.layout

    @property
    def dtype(self) -> torch.dtype:
        """Of the states."""
        return self.parts[0].index.dtype

    @property
    def part_of(self) -> NDArray[np.int64]:
        """[D], the directory of each document."""
        return np.repeat(np.arange(len(self.parts)), np.diff(self.first))

    @property
    def too_short(self) -> int:
        """Documents of less than two tokens, left out."""
        return sum(part.index.too_short for part in self.parts)

    @property
    def description(self) -> ShardDescription:
        """The facts about the documents that others need."""
        layout, declared = self.layout, self.parts[0].declaration
        return ShardDescription(
            aux_layer_ids=declared.aux_layer_ids,
            last_hidden=declared.last_hidden,
            num_aux_layers=layout.num_aux_layers,
            hidden_size=layout.hidden_size,
            num_documents=len(self),
            fingerprint=self.fingerprint,
            declared_by=declared.declared_by,
        )

    @property
    def fingerprint(self) -> str:
        """Hash of the set of documents, whatever their order and place."""
        return hashlib.blake2b(np.sort(self.sample_hash).tobytes(), digest_size=8).hexdigest()

    def path(self, document: int) -> Path:
        """The file that holds a document."""
        part, own = self._locate(document)
        return part.reader.path(own)

    def input_ids(self, document: int) -> Int[Tensor, " N"]:
        """int64; see :meth:`eagle3.data.reading.StateReader.input_ids`."""
        part, own = self._locate(document)
        return part.reader.input_ids(own)

    def loss_mask(self, document: int) -> Tensor:
        """bool [n], the supervised tokens."""
        return torch.from_numpy(self.runs.mask(document, int(self.lengths[document])))

    def label(self, document: int) -> str:
        """Where a document came from."""
        return self.sources[int(self.source[document])]

    def pieces(self, document: int, targets: Sequence[Target]) -> list[Piece]:
        """See :meth:`eagle3.data.reading.StateReader.pieces`."""
        part, own = self._locate(document)
        return part.reader.pieces(own, targets)

    def _locate(self, document: int) -> tuple[Shards, int]:
        place = int(np.searchsorted(self.first, document, side="right")) - 1
        return self.parts[place], document - int(self.first[place])


def check_same_states(ours: Shards, theirs: Shards) -> None:
    """Refuse directories that cannot train one drafter.

    Raises:
        DataError: naming the second directory and both sides.
    """
    a, b = ours.declaration, theirs.declaration
    if (a.aux_layer_ids, a.last_hidden) != (b.aux_layer_ids, b.last_hidden):
        raise DataError(
            f"{theirs.directory}: found states of layers {list(b.aux_layer_ids)} (entering), last "
            f"state {b.last_hidden}; expected {list(a.aux_layer_ids)} and {a.last_hidden} as in "
            f"{ours.directory}. Use captures of the same layers."
        )
    if ours.index.dtype != theirs.index.dtype:
        raise DataError(
            f"{theirs.directory}: found states in {theirs.index.dtype}, expected "
            f"{ours.index.dtype} as in {ours.directory}. Conversion keeps dtypes: capture "
            "one of them again, or train on one of them."
        )
