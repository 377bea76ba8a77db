"""A directory of captured states, opened: what it declares, what it holds, what gates a loss."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eagle3.data.bad_samples import BadSamples
from eagle3.data.declaration import Declaration, ResolvedDeclaration, resolve_declaration
from eagle3.data.formats import SpeculatorsV1, StateLayout
from eagle3.data.index import DocumentIndex, ShardDescription, build_index
from eagle3.data.masks import Runs
from eagle3.data.packing import PackingRule, Segmentation, segment_documents
from eagle3.errors import DataError
from eagle3.names import TrainOn

logger = logging.getLogger(__name__)
_MOSTLY_SUPERVISED = 0.95


@dataclass(frozen=True)
class Shards:
    """One directory under one ``train_on``."""

    reader: SpeculatorsV1
    declaration: ResolvedDeclaration
    index: DocumentIndex
    gates: Runs
    """Gated rows of every document."""

    @property
    def description(self) -> ShardDescription:
        """The facts about the directory that others need."""
        layout = self.reader.layout
        return ShardDescription(
            aux_layer_ids=self.declaration.aux_layer_ids,
            last_hidden=self.declaration.last_hidden,
            num_aux_layers=layout.num_aux_layers,
            hidden_size=layout.hidden_size,
            num_documents=len(self.index),
            fingerprint=self.index.fingerprint,
            declared_by=self.declaration.declared_by,
        )

    def segment(self, documents: Iterable[int], rule: PackingRule) -> Segmentation:
        """Cut some of the documents."""
        return segment_documents(documents, self.index.lengths, self.gates, rule)


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
) -> Shards:
    """Open a directory, or its first ``max_samples`` files.

    Raises:
        DataError: a fact is not declared, too many files are bad, the layout is another one, or
            nothing is supervised.
    """
    reader = SpeculatorsV1(directory, layout)
    resolved = resolve_declaration(
        declaration, reader.declaration(), layout.num_aux_layers, reader.directory
    )
    index = build_index(reader, reader.names[:max_samples], cache, bad_samples, num_workers)
    runs = index.runs.train_on(train_on, index.lengths)
    shards = Shards(reader, resolved, index, runs.gated_rows())
    _check_supervision(shards, runs, train_on)
    return shards


def _check_supervision(shards: Shards, runs: Runs, train_on: TrainOn) -> None:
    directory, index = shards.reader.directory, shards.index
    tokens, supervised = int(index.lengths.sum()), int(runs.totals().sum())
    empty = int(np.count_nonzero(shards.gates.totals() == 0))
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
