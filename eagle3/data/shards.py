"""A directory of captured states, opened: what it declares, what it holds, what gates a loss."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from eagle3.data.bad_samples import BadSamples
from eagle3.data.declaration import Declaration, ResolvedDeclaration, resolve_declaration
from eagle3.data.formats import open_store
from eagle3.data.index import DocumentIndex, build_index
from eagle3.data.layout import StateLayout
from eagle3.data.masks import Runs
from eagle3.data.reading import StateReader
from eagle3.data.sources import label
from eagle3.errors import DataError
from eagle3.names import ReadMode, TrainOn

logger = logging.getLogger(__name__)
_MOSTLY_SUPERVISED = 0.95


@dataclass(frozen=True)
class Shards:
    """One directory under one ``train_on``."""

    reader: StateReader
    declaration: ResolvedDeclaration
    index: DocumentIndex
    runs: Runs
    """Supervised tokens of every document under ``train_on``."""
    sources: tuple[str, ...]
    """Labels of where documents came from, see :mod:`eagle3.data.sources`."""
    source: NDArray[np.int64]
    """[D], place in ``sources``."""

    @property
    def directory(self) -> Path:
        """Where it lies."""
        return self.reader.directory


def open_shards(
    directory: Path | str,
    layout: StateLayout,
    declaration: Declaration,
    *,
    train_on: TrainOn,
    max_samples: int | None,
    cache: Path | str,
    bad_samples: BadSamples,
    num_workers: int,
    arrow: Path | None = None,
    source_labels: Path | None = None,
    read_mode: ReadMode = ReadMode.buffered,
) -> Shards:
    """Open a directory, or its first ``max_samples`` documents.

    Args:
        arrow: as :func:`eagle3.data.formats.open_store`.
        source_labels: as :func:`eagle3.data.sources.label`.
        read_mode: as :func:`eagle3.data.read_mode.choose_reader`, for ``num_workers`` threads.

    Raises:
        DataError: a fact is not declared, too many files are bad, the layout is another one,
            source labels are malformed, or nothing is supervised.
    """
    store = open_store(Path(directory), layout, arrow)
    resolved = resolve_declaration(
        declaration, store.declaration(), layout.num_aux_layers, store.directory
    )
    index = build_index(store, cache, bad_samples, num_workers, max_samples)
    runs = index.runs.train_on(train_on, index.lengths)
    sources, source = label(index, store.directory, source_labels)
    reader = StateReader.open(store, index, read_mode, num_workers)
    shards = Shards(reader, resolved, index, runs, sources, source)
    _check_supervision(shards, train_on)
    return shards


def _check_supervision(shards: Shards, train_on: TrainOn) -> None:
    directory, index = shards.directory, shards.index
    tokens, supervised = int(index.lengths.sum()), int(shards.runs.totals().sum())
    empty = int(np.count_nonzero(shards.runs.gated_rows().totals() == 0))
    if empty == len(index):
        raise DataError(
            f"{directory}: key 'loss_mask': found no supervised row in any of {len(index)} "
            "documents, expected ones on the verifier's answers. The capture's chat template or "
            "answer markers did not match: capture again, or set data.train_on=all."
        )
    logger.info(
        "%s: %d documents, %d tokens, %.1f %% supervised (data.train_on=%s)",
        directory,
        len(index),
        tokens,
        100 * supervised / tokens,
        train_on,
    )
    if empty:
        logger.warning("%s: %d documents have no supervised row", directory, empty)
    if supervised > _MOSTLY_SUPERVISED * tokens and train_on is not TrainOn.all:
        logger.warning(
            "%s: %.1f %% of the tokens are supervised: is the prompt masked?",
            directory,
            100 * supervised / tokens,
        )
