"""LightningDataModule over directories of captured hidden states.

It deals packs to ranks itself (run the Trainer with ``use_distributed_sampler=False``) and makes a
new plan every epoch (``reload_dataloaders_every_n_epochs=1``). Checkpoints hold the position in
the plan, so that a run which is continued trains the packs it would have trained.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import lightning
from jaxtyping import Int
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
from eagle3.data.splits import Splits, open_splits
from eagle3.data.tokens import TokenDocument
from eagle3.data.vocab_counts import token_frequencies
from eagle3.errors import ConfigError, DataError

logger = logging.getLogger(__name__)


class ShardDataModule(lightning.LightningDataModule):
    """Training and validation windows of one rank.

    Args:
        settings: where the states are, how they are cut and dealt.
        capture: makes the files of the directory where there are none, or goes on with a capture
            that was interrupted; None: both are errors.
    """

    def __init__(self, settings: DataSettings, capture: Callable[[], None] | None = None) -> None:
        super().__init__()
        if settings.num_workers < 1:
            raise ConfigError(f"data.num_workers: found {settings.num_workers}, expected 1 or more")
        self.settings = settings
        self._bad_samples = BadSamples(settings.max_bad_samples)
        self._capture = capture
        self._opened: Splits | None = None
        self._latest: tuple[int, Segmentation, EpochPlan] | None = None
        self._steps: dict[int, int] = {}
        self._continue_at: Position | None = None

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
    def description(self) -> ShardDescription:
        """What the training directories hold."""
        return self._splits.corpus.description

    @property
    def sources(self) -> tuple[str, ...]:
        """Labels of the validation documents."""
        return self._splits.val_corpus.sources

    @property
    def bytes_per_token(self) -> int:
        """Size of the states of a token on disk."""
        corpus = self._splits.corpus
        return corpus.layout.width * corpus.dtype.itemsize

    @property
    def report(self) -> PackingReport:
        """Packing of the first epoch."""
        segmentation, plan = self._plan(0)
        return packing_report(
            segmentation, plan, self.settings.max_seq_len, self._splits.corpus.too_short
        )

    @property
    def val_report(self) -> PackingReport:
        """Packing of the validation."""
        return self._splits.val_report

    @property
    def bad_samples(self) -> list[str]:
        """One line per sample that could not be used so far."""
        return self._bad_samples.lines

    def epoch_plan(self, epoch: int) -> EpochPlan:
        """Packs of all ranks in ``epoch``, the same on every rank."""
        return self._plan(epoch)[1]

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
        """
        epoch = self.trainer.current_epoch if self.trainer else 0
        plan, begin = self.epoch_plan(epoch), 0
        if self._continue_at is not None:
            begin = self._continue_at.first_step(epoch, plan, self.settings.on_change)
            self._continue_at = None
        return self._loader(
            plan, self._splits.corpus, self.settings.max_seq_len, epoch=epoch, start_step=begin
        )

    def val_dataloader(self) -> WindowLoader:
        """This rank's validation windows, one pack each, in a fixed order."""
        splits = self._splits
        return self._loader(splits.val_plan, splits.val_corpus, self.settings.val_max_seq_len)

    def state_dict(self) -> dict[str, Any]:
        """The place in the plan: windows whose optimizer step is done, not those read ahead."""
        assert self.trainer is not None, "saved without a trainer"
        epoch = self.trainer.current_epoch
        trained = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
        plan = self.epoch_plan(epoch)
        return Position.of(plan, epoch, trained, self._splits.corpus.fingerprint).to_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue there.

        Raises:
            DataError: other documents, unless ``data.on_change`` accepts them.
        """
        self.setup()
        position = Position.from_dict(state_dict)
        position.check(self._splits.corpus.fingerprint, self.settings.on_change)
        self._continue_at = position

    def token_frequencies(self) -> Int[Tensor, " W"]:
        """int64 [vocab_size], how often each token is supervised in the training documents."""
        splits = self._splits
        return token_frequencies(splits.corpus, splits.documents, self.settings.num_workers)

    def sample_batch(self, max_rows: int) -> PackedBatch:
        """The first training documents that are supervised, unshuffled, cut after ``max_rows``.

        Raises:
            DataError: all of them are bad.
        """
        splits, segments, room = self._splits, [], max_rows
        for pack in self._plan(0)[0].segments:
            document = pack[0].document
            rows = min(int(splits.corpus.lengths[document]) - 1, room)
            segments.append(Segment(document, 0, rows, 0, rows))
            room -= rows
            if not room:
                break
        reader = PackReader(splits.corpus)
        loaded = reader.load(tuple(segments), max_rows - room, epoch=0, place=0)
        for path, reason in loaded.bad:
            self._bad_samples.add(path, reason)
        if len(loaded.bad) == len(segments):
            raise DataError("\n".join(["No training document can be read:", *self.bad_samples]))
        return loaded.batch.trim()

    def validation_samples(self) -> list[str]:
        """Ids of the validation documents, sorted: hashes of their token ids."""
        splits = self._splits
        hashes = splits.val_corpus.sample_hash[splits.val_plan.packs.documents]
        return sorted(map(sample_id, hashes.tolist()))

    def training_tokens(self, max_tokens: int) -> list[TokenDocument]:
        """The first training documents that hold at most ``max_tokens`` tokens together."""
        splits = self._splits
        return _tokens(splits.corpus, splits.documents.tolist(), max_tokens)

    def validation_tokens(self, max_tokens: int) -> list[TokenDocument]:
        """All validation documents; none when they hold more than ``max_tokens`` tokens."""
        corpus = self._splits.val_corpus
        documents = self._splits.val_plan.packs.documents
        if int(corpus.lengths[documents].sum()) > max_tokens:
            return []
        return _tokens(corpus, documents.tolist(), max_tokens)

    @property
    def _splits(self) -> Splits:
        assert self._opened is not None, "call setup() first"
        return self._opened

    def _plan(self, epoch: int) -> tuple[Segmentation, EpochPlan]:
        if self._latest is None or self._latest[0] != epoch:
            segmentation = self._splits.segmentation(epoch)
            plan = self._splits.plan(segmentation, epoch)
            self._latest = epoch, segmentation, plan
            self._steps[epoch] = plan.steps
        return self._latest[1], self._latest[2]

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


def _tokens(corpus: Corpus, documents: Sequence[int], max_tokens: int) -> list[TokenDocument]:
    found = []
    for document in documents:
        max_tokens -= int(corpus.lengths[document])
        if max_tokens < 0:
            break
        ids, mask = corpus.input_ids(document), corpus.loss_mask(document)
        found.append(TokenDocument(ids.tolist(), mask.tolist()))
    return found
