"""Data module of a directory that a capture is still filling; what validates lies elsewhere.

What is not known before the last document has arrived is taken from the validation directory: what
the states are, an example of them, and how often each token is supervised.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from eagle3.data.corpus import Corpus
from eagle3.data.datamodule import DataModule
from eagle3.data.growing import GrowingDirectory, Patience
from eagle3.data.growing_loader import GrowingLoader
from eagle3.data.settings import DataSettings
from eagle3.data.splits import Validation, open_validation
from eagle3.data.store import DocumentRecord
from eagle3.data.tokens import TokenDocument

logger = logging.getLogger(__name__)
_GROUP_STEPS = 16
"""Optimizer steps whose documents are packed together: enough to fill packs and to put alike ones
into a step, few enough to begin early. The last step of a group may be partial."""


class GrowingDataModule(DataModule):
    """Each document is trained once, in order of arrival; one epoch, whose end is not known.

    Args:
        settings: one directory, which may be missing or empty at first, and ``val_directory``.
        max_steps: optimizer steps at most.
        timeout_s: seconds without a new document, while training waits for one, that are an error.
    """

    facts_from = "validation"

    def __init__(self, settings: DataSettings, max_steps: int, timeout_s: float) -> None:
        super().__init__(settings)
        self._max_steps = max_steps
        self._patience = Patience(timeout_s=timeout_s)
        self._opened: Validation | None = None

    def prepare_data(self) -> None:
        """On one process: index the validation, so that other ranks find the index."""
        self.setup()

    def setup(self, stage: str | None = None) -> None:
        """Open the validation directory; does nothing the second time.

        Raises:
            DataError: as :func:`eagle3.data.splits.open_validation`.
        """
        if self._opened is None:
            self._opened = open_validation(self.settings, self._bad_samples)
            for line in self.bad_samples:
                logger.warning("skipped: %s", line)

    def start_lines(self) -> list[str]:
        """What is said in place of a packing report."""
        directory = self.settings.directories[0]
        waits = "" if directory.exists() else " (not there yet)"
        return [
            f"data arrive while training: each document of {directory}{waits} once (epochs is "
            f"not used), until it is complete or {self._max_steps:,} optimizer steps are done; "
            f"packed in groups of {self._group_rows:,} rows, so the first step comes after so many",
            "data arrive while training: layers, norm, probe and coverage are those of "
            f"{self.settings.val_directory} ({self.val_report.documents:,} documents that "
            "validate); no packing report, no bigram and trigram references",
            "data arrive while training: where it waits for data, the capture is the slower one, "
            f"unless the disk is; nothing new for {self._patience.timeout_s:g} s stops the run",
        ]

    @property
    def tokens_lost(self) -> int:
        """Not known; 0."""
        return 0

    def epochs(self, wanted: int) -> int:
        """One, whatever is wanted."""
        return 1

    def steps_in_epoch(self, epoch: int) -> int:
        """The most there may be."""
        return self._max_steps

    def total_steps(self, epochs: int, at_most: int | None = None) -> int:
        """The most there may be."""
        return self._max_steps

    def train_dataloader(self) -> GrowingLoader:
        """This rank's windows, in the order in which documents arrive."""
        settings, corpus = self.settings, self._validation.corpus
        held_out = frozenset(corpus.prompt_hash.tolist())

        def validates(record: DocumentRecord) -> bool:
            return record.prompt_hash in held_out

        source = GrowingDirectory(
            settings.directories[0],
            settings.layout,
            self._bad_samples,
            arrow=settings.arrow,
            patience=self._patience,
            rank=settings.rank,
            agree=_told_by_first_rank,
        )
        return GrowingLoader(
            source,
            settings,
            self._bad_samples,
            self._group_rows,
            leave_out=validates,
            same_as=corpus.parts[0],
            max_steps=self._max_steps,
        )

    def training_tokens(self, max_tokens: int) -> list[TokenDocument]:
        """None: what has been trained is not read again."""
        return []

    @property
    def _group_rows(self) -> int:
        settings = self.settings
        packs = _GROUP_STEPS * settings.accumulate * settings.world_size
        return packs * settings.max_seq_len

    @property
    def _validation(self) -> Validation:
        assert self._opened is not None, "call setup() first"
        return self._opened

    @property
    def _corpus(self) -> Corpus:
        return self._validation.corpus

    @property
    def _documents(self) -> NDArray[np.int64]:
        return self._validation.plan.packs.documents

    def _supervised(self) -> Iterable[int]:
        return self._documents.tolist()


def _told_by_first_rank(names: list[str]) -> list[str]:
    """On every rank the list that rank 0 passes."""
    if not (dist.is_available() and dist.is_initialized()):
        return names
    told = [names]
    dist.broadcast_object_list(told)
    return told[0]
