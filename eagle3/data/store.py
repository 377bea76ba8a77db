"""One view of a directory of captured states, whatever its format.

A format knows where bytes are and nothing else: which files there are, and for each document in a
file the place of its token ids and of every plane of its states (:mod:`eagle3.data.layout`). All
of it goes into the index once; reading needs the index only (:mod:`eagle3.data.reading`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from eagle3.data.declaration import StoredDeclaration
from eagle3.data.layout import Plane, StateLayout
from eagle3.errors import DataError


@dataclass(frozen=True, slots=True, eq=False)
class DocumentRecord:
    """One document as a format finds it, with the places of its bytes."""

    file: str
    """Name within the directory."""
    length: int
    """Tokens."""
    runs: NDArray[np.int64]
    """[R, 2], runs of supervised tokens as captured."""
    sample_hash: int
    """64 bits, of all token ids."""
    prompt_hash: int
    """64 bits, of the token ids before the first supervised one; of all where there are none."""
    dtype: str
    """Of the states, named as in torch: ``bfloat16``."""
    ids_offset: int
    """Byte of the first token id."""
    ids_bytes: int
    """Size of a token id, 2, 4 or 8; little-endian integers."""
    state_offsets: tuple[int, ...]
    """Byte of the first token's first value, for each plane of the format."""
    source: str = ""
    """Label of where the document came from; empty: the format does not say."""


class Store(Protocol):
    """A directory in one format. Pickled, it is small: other processes probe files, too."""

    directory: Path
    layout: StateLayout

    @property
    def planes(self) -> tuple[Plane, ...]:
        """How the states of every document are laid out."""

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that hold documents, in the directory's order."""

    @property
    def side_files(self) -> tuple[Path, ...]:
        """Other files that the records follow from; a change of one makes a new index."""

    def declaration(self) -> StoredDeclaration:
        """What the directory says about its states.

        Raises:
            DataError: it says something that cannot be, or is not complete.
        """

    def probe(self, file: str) -> Sequence[DocumentRecord]:
        """The documents of one file, without reading states. Safe from several threads.

        Raises:
            LayoutError: other sizes than :attr:`layout`.
            DataError: anything else that is not as it should be.
        """


def attempt(store: Store, file: str) -> Sequence[DocumentRecord] | DataError:
    """Probe a file; what is wrong with it is returned, not raised."""
    try:
        return store.probe(file)
    except DataError as error:
        return error
