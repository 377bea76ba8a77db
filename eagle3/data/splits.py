"""The documents of a run, opened and divided: who is trained, who validates, and each epoch's plan.

Everything here follows from the settings and the index, and is the same on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from eagle3.data.bad_samples import BadSamples
from eagle3.data.corpus import Corpus, check_same_states
from eagle3.data.index import validation_documents
from eagle3.data.mixture import epoch_documents
from eagle3.data.packing import Segmentation, segment_documents
from eagle3.data.plan import (
    EpochPlan,
    PackingReport,
    packing_report,
    training_plan,
    validation_plan,
)
from eagle3.data.settings import DataSettings
from eagle3.data.shards import Shards, open_shards
from eagle3.errors import DataError


@dataclass(frozen=True, eq=False)
class Validation:
    """The documents that validate."""

    corpus: Corpus
    """The explicit validation directory, or the training directories."""
    plan: EpochPlan
    report: PackingReport


@dataclass(frozen=True, eq=False)
class Splits:
    """Training and validation documents of a run."""

    settings: DataSettings
    corpus: Corpus
    """The training directories."""
    documents: NDArray[np.int64]
    """The ones that are trained."""
    validation: Validation

    def segmentation(self, epoch: int) -> Segmentation:
        """The documents of an epoch, cut."""
        part_of = self.corpus.part_of[self.documents]
        places = epoch_documents(part_of, self.settings.weights, self.settings.seed, epoch)
        return segment_documents(
            self.documents[places], self.corpus.lengths, self.corpus.gates, self.settings.rule
        )

    def plan(self, segmentation: Segmentation, epoch: int) -> EpochPlan:
        """Packs of all ranks in ``epoch``."""
        settings = self.settings
        return training_plan(
            segmentation.segments,
            settings.max_seq_len,
            settings.seed,
            epoch,
            settings.world_size,
            settings.accumulate,
        )


def open_splits(settings: DataSettings, bad_samples: BadSamples) -> Splits:
    """Open all directories and divide their documents.

    Raises:
        DataError: as :func:`eagle3.data.shards.open_shards`, directories declare different states,
            or no document is left to train on.
        ConfigError: no room for a split.
    """
    parts = [_open(directory, settings, bad_samples) for directory in settings.directories]
    corpus = Corpus.join(parts)
    if settings.val_directory is None:
        held_out = validation_documents(corpus.prompt_hash, settings.val_ratio)
        validation = _validation(settings, corpus, np.flatnonzero(held_out), too_short=0)
    else:
        held_out = np.zeros(len(corpus), np.bool_)
        validation = open_validation(settings, bad_samples)
        check_same_states(parts[0], validation.corpus.parts[0])
    splits = Splits(settings, corpus, np.flatnonzero(~held_out), validation)
    _check_something_trains(splits)
    return splits


def open_validation(settings: DataSettings, bad_samples: BadSamples) -> Validation:
    """Open the explicit validation directory, all of which validates.

    Raises:
        DataError: as :func:`eagle3.data.shards.open_shards`.
    """
    assert settings.val_directory is not None
    shards = _open(settings.val_directory, settings, bad_samples, all_samples=True)
    corpus = Corpus.join([shards])
    return _validation(settings, corpus, np.arange(len(corpus)), corpus.too_short)


def _validation(
    settings: DataSettings, corpus: Corpus, documents: NDArray[np.int64], too_short: int
) -> Validation:
    cut = segment_documents(documents, corpus.lengths, corpus.gates, settings.val_rule)
    plan = validation_plan(cut.segments, settings.val_max_seq_len, settings.world_size)
    return Validation(corpus, plan, packing_report(cut, plan, settings.val_max_seq_len, too_short))


def _open(
    directory: Path, settings: DataSettings, bad_samples: BadSamples, *, all_samples: bool = False
) -> Shards:
    return open_shards(
        directory,
        settings.layout,
        settings.declaration,
        train_on=settings.train_on,
        max_samples=None if all_samples else settings.max_samples,
        cache=settings.cache,
        bad_samples=bad_samples,
        num_workers=settings.num_workers,
        arrow=settings.arrow,
        source_labels=settings.source_labels,
        read_mode=settings.read_mode,
    )


def _check_something_trains(splits: Splits) -> None:
    settings = splits.settings
    if not splits.segmentation(0).segments:
        names = ", ".join(str(directory) for directory in settings.directories)
        raise DataError(
            f"{names}: found no supervised row in {len(splits.documents)} training documents "
            f"(data.long_documents={settings.long_documents}), expected some. "
            "Raise max_seq_len, set data.long_documents=split, or add documents."
        )
