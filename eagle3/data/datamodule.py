"""LightningDataModules over captured hidden states: what all share, and that of whole directories.

They deal packs to ranks themselves (run the Trainer with ``use_distributed_sampler=False``). Whole
directories get a new plan every epoch (``reload_dataloaders_every_n_epochs=1``), and checkpoints
hold the position in it, so that a run which is continued trains the packs it would have trained.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import lightning
import numpy as np
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from eagle3.data.bad_samples import BadSamples
from eagle3.data.batch import PackedBatch
from eagle3.data.corpus import Corpus
from eagle3.data.declaration import is_unfinished
from eagle3.data.formats import has_documents
from eagle3.data.hashing import sample_id
from eagle3.data.index import ShardDescription
from eagle3.data.loader import PackReader, WindowLoader
from eagle3.data.packing import Segment, Segmentation
from eagle3.data.plan import EpochPlan, PackingReport, packing_report
from eagle3.data.position import Position
from eagle3.data.settings import DataSettings
from eagle3.data.splits import Splits, Validation, open_splits
from eagle3.data.tokens import TokenDocument
from eagle3.data.vocab_counts import token_frequencies
from eagle3.errors import ConfigError, DataError

logger = logging.getLogger(__name__)


class DataModule(lightning.LightningDataModule, ABC):
    """What a run asks of its data, and the validation, which is the same however data arrive.

    Args:
        settings: where the states are, how they are cut and dealt.
    """

    facts_from = "training"
    """The documents that facts, examples and token counts are taken from."""

    def __init__(self, settings: DataSettings) -> None:
        super().__init__()
        if settings.num_workers < 1:
            raise ConfigError(f"data.num_workers: found {settings.num_workers}, expected 1 or more")
        self.settings = settings
        self._bad_samples = BadSamples(settings.max_bad_samples)

    @abstractmethod
    def setup(self, stage: str | None = None) -> None:
        """Open what is read; does nothing the second time."""

    @abstractmethod
    def start_lines(self) -> list[str]:
        """For people: what is known about the training documents."""

    @property
    @abstractmethod
    def tokens_lost(self) -> int:
        """Rows of long documents that are not trained, as far as it is known at the start."""

    @abstractmethod
    def epochs(self, wanted: int) -> int:
        """Passes over the training documents."""

    @abstractmethod
    def steps_in_epoch(self, epoch: int) -> int:
        """Optimizer steps of ``epoch``."""

    @abstractmethod
    def total_steps(self, epochs: int, at_most: int | None = None) -> int:
        """Optimizer steps of the first ``epochs`` epochs, counted up to ``at_most``."""

    @abstractmethod
    def training_tokens(self, max_tokens: int) -> list[TokenDocument]:
        """The first training documents that hold at most ``max_tokens`` tokens together."""

    @property
    @abstractmethod
    def _corpus(self) -> Corpus:
        """Where facts are taken from."""

    @property
    @abstractmethod
    def _documents(self) -> NDArray[np.int64]:
        """Those of its documents that are counted."""

    @abstractmethod
    def _supervised(self) -> Iterable[int]:
        """Those of them that have a supervised row, in order."""

    @property
    @abstractmethod
    def _validation(self) -> Validation: ...

    @property
    def description(self) -> ShardDescription:
        """What the states are."""
        return self._corpus.description

    @property
    def sources(self) -> tuple[str, ...]:
        """Labels of the validation documents."""
        return self._validation.corpus.sources

    @property
    def bytes_per_token(self) -> int:
        """Size of the states of a token on disk."""
        return self._corpus.layout.width * self._corpus.dtype.itemsize

    @property
    def document_lengths(self) -> NDArray[np.int64]:
        """[D], tokens of each document in :attr:`facts_from`."""
        return self._corpus.lengths[self._documents]

    @property
    def val_report(self) -> PackingReport:
        """Packing of the validation."""
        return self._validation.report

    @property
    def bad_samples(self) -> list[str]:
        """One line per sample that could not be used so far."""
        return self._bad_samples.lines

    def val_dataloader(self) -> WindowLoader:
        """This rank's validation windows, one pack each, in a fixed order."""
        validation = self._validation
        return self._loader(validation.plan, validation.corpus, self.settings.val_max_seq_len)

    def token_frequencies(self) -> Int[Tensor, " W"]:
        """int64 [vocab_size], how often each token is supervised in :attr:`facts_from`."""
        return token_frequencies(self._corpus, self._documents, self.settings.num_workers)

    def sample_batch(self, max_rows: int) -> PackedBatch:
        """The first documents that are supervised, unshuffled, cut after ``max_rows``.

        Raises:
            DataError: all of them are bad.
        """
        segments, room = [], max_rows
        for document in self._supervised():
            rows = min(int(self._corpus.lengths[document]) - 1, room)
            segments.append(Segment(document, 0, rows, 0, rows))
            room -= rows
            if not room:
                break
        reader = PackReader(self._corpus)
        loaded = reader.load(tuple(segments), max_rows - room, epoch=0, place=0)
        for path, reason in loaded.bad:
            self._bad_samples.add(path, reason)
        if len(loaded.bad) == len(segments):
            found = f"No {self.facts_from} document can be read:"
            raise DataError("\n".join([found, *self.bad_samples]))
        return loaded.batch.trim()

    def validation_samples(self) -> list[str]:
        """Ids of the validation documents, sorted: hashes of their token ids."""
        validation = self._validation
        hashes = validation.corpus.sample_hash[validation.plan.packs.documents]
        return sorted(map(sample_id, hashes.tolist()))

    def validation_tokens(self, max_tokens: int) -> list[TokenDocument]:
        """All validation documents that can be read, whatever became of the others since they were
        indexed; none when they hold more than ``max_tokens`` tokens."""
        corpus = self._validation.corpus
        documents = self._validation.plan.packs.documents
        if int(corpus.lengths[documents].sum()) > max_tokens:
            return []
        return _tokens(corpus, documents.tolist(), max_tokens)

    def _loader(
        self,
        plan: EpochPlan,
        corpus: Corpus,
        max_seq_len: int,
        *,
        epoch: int = 0,
        start_step: int = 0,
    ) -> WindowLoader:
        settings = self.settings
        return WindowLoader(
            plan=plan,
            reader=PackReader(corpus, settings.pin_memory),
            bad_samples=self._bad_samples,
            max_seq_len=max_seq_len,
            rank=settings.rank,
            epoch=epoch,
            num_workers=settings.num_workers,
            prefetch_windows=settings.prefetch_windows,
            start_step=start_step,
        )


class ShardDataModule(DataModule):
    """Training and validation windows of one rank.

    Args:
        settings: where the states are, how they are cut and dealt.
        capture: makes the files of the directory where there are none, or goes on with a capture
            that was interrupted; None: both are errors.
    """

    def __init__(self, settings: DataSettings, capture: Callable[[], None] | None = None) -> None:
        super().__init__(settings)
        self._capture = capture
        self._opened: Splits | None = None
        self._latest: tuple[int, Segmentation, EpochPlan] | None = None
        self._steps: dict[int, int] = {}
        self._continue_at: Position | None = None
        self._continued = False

    def prepare_data(self) -> None:
        """On one process: capture missing files, and index, so that other ranks find the index."""
        directory = self.settings.directories[0]
        missing = not has_documents(directory) or is_unfinished(directory)
        if self._capture is not None and missing:
            self._capture()
        self.setup()

    def setup(self, stage: str | None = None) -> None:
        """Open the directories and plan; does nothing the second time.

        Raises:
            DataError, ConfigError: as :func:`eagle3.data.splits.open_splits`.
        """
        if self._opened is None:
            self._opened = open_splits(self.settings, self._bad_samples)
            for line in self.bad_samples:
                logger.warning("skipped: %s", line)

    @property
    def report(self) -> PackingReport:
        """Packing of the first epoch."""
        segmentation, plan = self._plan(0)
        return packing_report(segmentation, plan, self.settings.max_seq_len, self._corpus.too_short)

    def start_lines(self) -> list[str]:
        """The packing report."""
        return self.report.lines()

    @property
    def tokens_lost(self) -> int:
        return self.report.lost_tokens

    def epoch_plan(self, epoch: int) -> EpochPlan:
        """Packs of all ranks in ``epoch``, the same on every rank."""
        return self._plan(epoch)[1]

    def epochs(self, wanted: int) -> int:
        """As many as are wanted."""
        return wanted

    def steps_in_epoch(self, epoch: int) -> int:
        """Optimizer steps of ``epoch``; may differ by a few between epochs."""
        if epoch not in self._steps:
            self._plan(epoch)
        return self._steps[epoch]

    def total_steps(self, epochs: int, at_most: int | None = None) -> int:
        """Optimizer steps of the first ``epochs`` epochs, counted up to ``at_most``."""
        steps = 0
        for epoch in range(epochs):
            steps += self.steps_in_epoch(epoch)
            if at_most is not None and steps >= at_most:
                return at_most
        return steps

    def train_dataloader(self) -> WindowLoader:
        """This rank's windows of the trainer's current epoch; of epoch 0 without a trainer.

        After a checkpoint was loaded, its epoch begins at the first window that was not trained.

        Raises:
            DataError: the checkpoint does not say which windows were trained.
        """
        if self.trainer and self.trainer.ckpt_path and not self._continued:
            raise DataError(
                f"{self.trainer.ckpt_path}: found no place in a plan, expected one. It was saved "
                "while documents arrived (data.arrival=growing); such a run cannot be "
                "continued: begin a new one."
            )
        epoch = self.trainer.current_epoch if self.trainer else 0
        plan, begin = self.epoch_plan(epoch), 0
        if self._continue_at is not None:
            begin = self._continue_at.first_step(epoch, plan, self.settings.on_change)
            self._continue_at = None
        return self._loader(
            plan, self._corpus, self.settings.max_seq_len, epoch=epoch, start_step=begin
        )

    def state_dict(self) -> dict[str, Any]:
        """The place in the plan: windows whose optimizer step is done, not those read ahead."""
        assert self.trainer is not None, "saved without a trainer"
        epoch = self.trainer.current_epoch
        trained = self.trainer.fit_loop.epoch_loop.batch_progress.current.completed
        plan = self.epoch_plan(epoch)
        return Position.of(plan, epoch, trained, self._corpus.fingerprint).to_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue there.

        Raises:
            DataError: other documents, unless ``data.on_change`` accepts them.
        """
        self.setup()
        position = Position.from_dict(state_dict)
        position.check(self._corpus.fingerprint, self.settings.on_change)
        self._continue_at, self._continued = position, True

    def training_tokens(self, max_tokens: int) -> list[TokenDocument]:
        """The first training documents that hold at most ``max_tokens`` tokens together."""
        splits = self._splits
        return _tokens(splits.corpus, splits.documents.tolist(), max_tokens)

    @property
    def _splits(self) -> Splits:
        assert self._opened is not None, "call setup() first"
        return self._opened

    @property
    def _corpus(self) -> Corpus:
        return self._splits.corpus

    @property
    def _documents(self) -> NDArray[np.int64]:
        return self._splits.documents

    def _supervised(self) -> Iterable[int]:
        return (pack[0].document for pack in self._plan(0)[0].segments)

    @property
    def _validation(self) -> Validation:
        return self._splits.validation

    def _plan(self, epoch: int) -> tuple[Segmentation, EpochPlan]:
        if self._latest is None or self._latest[0] != epoch:
            segmentation = self._splits.segmentation(epoch)
            plan = self._splits.plan(segmentation, epoch)
            self._latest = epoch, segmentation, plan
            self._steps[epoch] = plan.steps
        return self._latest[1], self._latest[2]


def _tokens(corpus: Corpus, documents: Sequence[int], max_tokens: int) -> list[TokenDocument]:
    """Those that can still be read: a file may have gone since it was indexed."""
    found, gone = [], []
    for document in documents:
        max_tokens -= int(corpus.lengths[document])
        if max_tokens < 0:
            break
        try:
            ids, mask = corpus.input_ids(document), corpus.loss_mask(document)
        except DataError as error:
            gone.append(str(error))
            continue
        found.append(TokenDocument(ids.tolist(), mask.tolist()))
    if gone:
        logger.warning("left out of the references: %d documents, first %s", len(gone), gone[0])
    return found
