"""Native directories of captured states: a manifest, an index, and a few large files of states.

::

    manifest.json                what the states are, what must be there     native_manifest
    index.npz                    every sample, its place and its checksums   native_index
    shard-00000.safetensors ...  the states, documents end to end            native_shard

They are written by :mod:`eagle3.data.native_writer`.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from eagle3.data.declaration import Declaration, StoredDeclaration
from eagle3.data.index import DocumentIndex
from eagle3.data.layout import LayoutError, StateLayout
from eagle3.data.native_index import NativeIndex, read_index
from eagle3.data.native_manifest import INDEX_NAME, MANIFEST_NAME, Manifest, read_manifest
from eagle3.data.native_shard import ID_BYTES
from eagle3.data.store import DocumentRecord
from eagle3.errors import DataError
from eagle3.names import LayerIdConvention

WRITING_NAME = ".writing"
"""Folder within a directory that is still being written."""


class NativeStore:
    """The documents of one directory, in the order in which they were written."""

    def __init__(self, directory: Path, layout: StateLayout) -> None:
        """Read the manifest.

        Raises:
            LayoutError: its states have other sizes than ``layout``.
            DataError: it is missing or damaged.
        """
        self.directory = directory
        self.layout = layout
        self.manifest = read_manifest(directory)
        self.files = tuple(shard.file for shard in self.manifest.shards)
        self.planes = (layout.aux, layout.last)
        self.side_files = (directory / MANIFEST_NAME, directory / INDEX_NAME)
        _check_layout(self.manifest.states.layout, layout, directory / MANIFEST_NAME)

    def declaration(self) -> StoredDeclaration:
        """What the manifest says."""
        states = self.manifest.states
        return StoredDeclaration(
            Declaration(states.aux_layer_ids, LayerIdConvention.entering, states.last_hidden),
            file=MANIFEST_NAME,
        )

    @cached_property
    def index(self) -> NativeIndex:
        """``index.npz``.

        Raises:
            DataError: it is missing, damaged, or belongs to another directory.
        """
        return read_index(self.directory, self.manifest)

    def probe(self, file: str) -> tuple[DocumentRecord, ...]:
        """See :meth:`eagle3.data.store.Store.probe`."""
        shard = self.files.index(file)
        check_shard_size(self.directory, self.manifest, shard)
        index, documents = self.index, self.index.documents
        places = np.flatnonzero(index.shard == shard)
        offsets = self._offsets(places)
        bounds = documents.runs.offsets
        return tuple(
            DocumentRecord(
                file=file,
                length=int(documents.lengths[d]),
                runs=documents.runs.bounds[bounds[d] : bounds[d + 1]],
                sample_hash=int(documents.sample_hash[d]),
                prompt_hash=int(documents.prompt_hash[d]),
                dtype=self.manifest.states.dtype,
                ids_offset=int(offsets[place, 2]),
                ids_bytes=ID_BYTES,
                state_offsets=(int(offsets[place, 0]), int(offsets[place, 1])),
                source=documents.sources[int(documents.source[d])],
            )
            for place, d in enumerate(places)
        )

    def stored_index(self, max_samples: int | None) -> DocumentIndex:
        """All documents, or the first ``max_samples``, as :func:`eagle3.data.index.build_index`
        would find them by probing, without a look into the shards.

        Raises:
            DataError: a shard is missing or has another size, or the index is damaged.
        """
        for shard in range(len(self.files)):
            check_shard_size(self.directory, self.manifest, shard)
        first = np.arange(len(self.index))[:max_samples]
        usable = first[self.index.documents.lengths[first] >= 2]
        documents, offsets = self.index.documents.take(usable), self._offsets(usable)
        if not len(usable):
            raise DataError(
                f"{self.directory}: found {len(first)} documents shorter than two tokens, expected "
                "at least one usable document. Convert or capture it again."
            )
        return DocumentIndex(
            files=self.files,
            file=self.index.shard[usable],
            lengths=documents.lengths,
            runs=documents.runs,
            sample_hash=documents.sample_hash,
            prompt_hash=documents.prompt_hash,
            ids_offset=offsets[:, 2],
            ids_bytes=np.full(len(usable), ID_BYTES, np.int64),
            state_offsets=offsets[:, :2],
            sources=documents.sources,
            source=documents.source,
            dtype=getattr(torch, self.manifest.states.dtype),
            too_short=len(first) - len(usable),
        )

    def _offsets(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """[N, 4]: byte of the first token of each document in each tensor."""
        layouts = [self.manifest.shard_layout(shard) for shard in range(len(self.files))]
        starts = np.array([layout.starts for layout in layouts], np.int64)
        row_bytes = np.array(layouts[0].row_bytes, np.int64)
        return starts[self.index.shard[places]] + self.index.start[places, None] * row_bytes


def is_native(directory: Path) -> bool:
    """Whether there is a manifest, hence a complete directory."""
    return (directory / MANIFEST_NAME).is_file()


def is_unfinished(directory: Path) -> bool:
    """Whether a native directory is being written here, or was until it was interrupted."""
    return not is_native(directory) and (directory / WRITING_NAME).is_dir()


def has_lost_manifest(directory: Path) -> bool:
    """Whether the other files of a complete native directory are here."""
    shards = any(directory.glob("shard-*.safetensors"))
    return not is_native(directory) and (shards or (directory / INDEX_NAME).is_file())


def read_layout(directory: Path) -> StateLayout:
    """Sizes of the states of a native directory.

    Raises:
        DataError: its manifest is missing or damaged.
    """
    return read_manifest(directory).states.layout


def check_shard_size(directory: Path, manifest: Manifest, shard: int) -> None:
    """See that a shard is there and whole, by its size.

    Raises:
        DataError: it is not.
    """
    facts = manifest.shards[shard]
    path = directory / facts.file
    try:
        found = path.stat().st_size
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error}), expected a shard of {facts.num_samples:,} samples. "
            "Copy it again from its origin, or convert the directory again."
        ) from error
    if found != facts.bytes:
        raise DataError(
            f"{path}: found {found:,} bytes, expected {facts.bytes:,} as in {MANIFEST_NAME}: it "
            "was cut or replaced. Copy it again from its origin, or convert the directory again; "
            "`python -m eagle3.shards verify` names the samples."
        )


def _check_layout(found: StateLayout, expected: StateLayout, path: Path) -> None:
    for key, name in (
        ("num_aux_layers", "hidden_states.num_aux_layers"),
        ("hidden_size", "verifier.hidden_size"),
        ("vocab_size", "verifier.vocab_size"),
    ):
        there, here = getattr(found, key), getattr(expected, key)
        if there != here:
            raise LayoutError(
                f"{path}: key '{name}': found {there}, expected {here} (model.{key}). Set "
                f"model.{key}={there} if the verifier has it so, or use its own captures."
            )
