"""LightningDataModule over directories of captured hidden states.

It deals packs to ranks itself (run the Trainer with ``use_distributed_sampler=False``) and makes a
new plan every epoch (``reload_dataloaders_every_n_epochs=1``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import lightning
import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from eagle3.data.bad_samples import BadSamples
from eagle3.data.batch import PackedBatch
from eagle3.data.declaration import Declaration, is_unfinished
from eagle3.data.formats import StateLayout, list_documents
from eagle3.data.index import ShardDescription, validation_documents
from eagle3.data.loader import PackReader, WindowLoader
from eagle3.data.masks import apply_train_on
from eagle3.data.packing import PackingRule, Segment, Segmentation, pack_epoch
from eagle3.data.plan import EpochPlan, PackingReport, packing_report, validation_plan
from eagle3.data.shards import Shards, open_shards
from eagle3.data.tokens import TokenDocument
from eagle3.errors import ConfigError, DataError
from eagle3.names import LongDocuments, TrainOn

logger = logging.getLogger(__name__)
_COUNT_FILES = 64


@dataclass(frozen=True)
class _Opened:
    """What :meth:`ShardDataModule.setup` finds and plans once."""

    shards: Shards
    """The training directory."""
    train_documents: tuple[int, ...]
    train: Segmentation
    reader: PackReader
    val_reader: PackReader
    val_plan: EpochPlan
    val_report: PackingReport


class ShardDataModule(lightning.LightningDataModule):
    """Training and validation windows of one rank.

    Args:
        shards: directory of captures to train on.
        val_shards: explicit validation directory; None: prompts chosen from ``shards`` by hash.
        cache: where indexes are kept, outside the data directories.
        declaration: what the config says about the states.
        num_aux_layers: K.
        hidden_size: H.
        vocab_size: of the verifier.
        max_seq_len: rows of a training pack.
        val_max_seq_len: rows of a validation pack.
        ttt_steps: TTT steps in training.
        draft_steps: draft steps in validation.
        long_documents: treatment of training documents longer than a pack; validation splits.
        split_context_tokens: context rows of a split.
        val_ratio: share of prompts held out where ``val_shards`` is None.
        train_on: which tokens gate a loss.
        max_samples: use the first so many files of ``shards``; None: all.
        max_bad_samples: bad samples before the run stops.
        num_workers: reader threads.
        prefetch_windows: optimizer windows read ahead.
        accumulate: packs of a rank in an optimizer step.
        seed: seeds the order of an epoch, together with its number.
        rank: global rank.
        world_size: number of ranks.
        pin_memory: read into page-locked memory.
        capture: makes the files of ``shards`` where there are none, or goes on with a capture that
            was interrupted; None: both are errors.
    """

    def __init__(
        self,
        *,
        shards: Path | str,
        val_shards: Path | str | None = None,
        cache: Path | str,
        declaration: Declaration,
        num_aux_layers: int,
        hidden_size: int,
        vocab_size: int,
        max_seq_len: int,
        val_max_seq_len: int,
        ttt_steps: int,
        draft_steps: int,
        long_documents: LongDocuments,
        split_context_tokens: int,
        val_ratio: float,
        train_on: TrainOn,
        max_samples: int | None,
        max_bad_samples: int,
        num_workers: int,
        prefetch_windows: int,
        accumulate: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        pin_memory: bool = False,
        capture: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        if num_workers < 1:
            raise ConfigError(f"data.num_workers: found {num_workers}, expected at least 1.")
        self._directory = Path(shards)
        self._val_directory = val_shards
        self._cache = cache
        self._declaration = declaration
        self._layout = StateLayout(num_aux_layers, hidden_size, vocab_size)
        self._rule = PackingRule(max_seq_len, long_documents, split_context_tokens, ttt_steps)
        self._val_rule = PackingRule(
            val_max_seq_len, LongDocuments.split, split_context_tokens, draft_steps
        )
        self._val_ratio = val_ratio
        self._train_on = train_on
        self._max_samples = max_samples
        self._bad_samples = BadSamples(max_bad_samples)
        self._num_workers = num_workers
        self._prefetch_windows = prefetch_windows
        self._accumulate = accumulate
        self._seed = seed
        self._rank = rank
        self._world_size = world_size
        self._pin_memory = pin_memory
        self._capture = capture
        self._setup_result: _Opened | None = None
        self._latest_plan: tuple[int, EpochPlan] | None = None
        self._steps: dict[int, int] = {}

    def prepare_data(self) -> None:
        """On one process: capture missing files, and index, so that other ranks find the index."""
        missing = not list_documents(self._directory) or is_unfinished(self._directory)
        if self._capture is not None and missing:
            self._capture()
        self.setup()

    def setup(self, stage: str | None = None) -> None:
        """Open the directories and plan; does nothing the second time.

        Raises:
            DataError: as :func:`eagle3.data.shards.open_shards`, the validation directory declares
                other states, or no document is left to train on.
            ConfigError: no room for a split.
        """
        if self._setup_result is None:
            self._setup_result = self._open_all()
            self._log_setup(self._setup_result)

    @property
    def description(self) -> ShardDescription:
        """What the training directory holds."""
        return self._opened.shards.description

    @property
    def report(self) -> PackingReport:
        """Packing of the first epoch."""
        opened = self._opened
        return packing_report(
            opened.train, self.epoch_plan(0), self._rule.max_seq_len, opened.shards.index.too_short
        )

    @property
    def val_report(self) -> PackingReport:
        """Packing of the validation."""
        return self._opened.val_report

    @property
    def bad_samples(self) -> list[str]:
        """One line per sample that could not be used so far."""
        return self._bad_samples.lines

    def epoch_plan(self, epoch: int) -> EpochPlan:
        """Packs of all ranks in ``epoch``, the same on every rank."""
        if self._latest_plan is None or self._latest_plan[0] != epoch:
            packs = pack_epoch(
                self._opened.train.segments, self._rule.max_seq_len, self._seed, epoch
            )
            plan = EpochPlan(packs, self._world_size, self._accumulate)
            self._latest_plan = epoch, plan
            self._steps[epoch] = plan.steps
        return self._latest_plan[1]

    def steps_in_epoch(self, epoch: int) -> int:
        """Optimizer steps of ``epoch``; may differ by a few between epochs."""
        if epoch not in self._steps:
            self.epoch_plan(epoch)
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
        """This rank's windows of the trainer's current epoch; of epoch 0 without a trainer."""
        epoch = self.trainer.current_epoch if self.trainer else 0
        return self._loader(
            self.epoch_plan(epoch), self._opened.reader, self._rule.max_seq_len, epoch
        )

    def val_dataloader(self) -> WindowLoader:
        """This rank's validation windows, one pack each, in a fixed order."""
        opened = self._opened
        return self._loader(opened.val_plan, opened.val_reader, self._val_rule.max_seq_len, epoch=0)

    def token_frequencies(self) -> Int[Tensor, " W"]:
        """int64 [vocab_size], how often each token is supervised in the training documents."""
        shards, documents = self._opened.shards, self._opened.train_documents
        counts = np.zeros(self._layout.vocab_size, np.int64)

        def supervised_ids(document: int) -> np.ndarray:
            sample = shards.reader.open(shards.index.names[document])
            return sample.input_ids[apply_train_on(sample.loss_mask, self._train_on)].numpy()

        with ThreadPoolExecutor(self._num_workers) as pool:
            for i in range(0, len(documents), _COUNT_FILES):
                ids = list(pool.map(supervised_ids, documents[i : i + _COUNT_FILES]))
                counts += np.bincount(np.concatenate(ids), minlength=len(counts))
        return torch.from_numpy(counts)

    def sample_batch(self, max_rows: int) -> PackedBatch:
        """The first training documents that are supervised, unshuffled, cut after ``max_rows``.

        Raises:
            DataError: all of them are bad.
        """
        opened, segments, room = self._opened, [], max_rows
        for document in (pack[0].document for pack in opened.train.segments):
            rows = min(int(opened.shards.index.lengths[document]) - 1, room)
            segments.append(Segment(document, 0, rows, 0, rows))
            room -= rows
            if not room:
                break
        loaded = opened.reader.load(tuple(segments), max_rows - room, epoch=0, place=0)
        for path, reason in loaded.bad:
            self._bad_samples.add(path, reason)
        if len(loaded.bad) == len(segments):
            raise DataError("\n".join(["No training document can be read:", *self.bad_samples]))
        return loaded.batch.trim()

    def training_tokens(self, max_tokens: int) -> list[TokenDocument]:
        """The first training documents that hold at most ``max_tokens`` tokens together."""
        opened = self._opened
        return self._tokens(opened.reader, opened.train_documents, max_tokens)

    def validation_tokens(self, max_tokens: int) -> list[TokenDocument]:
        """All validation documents; none when they hold more than ``max_tokens`` tokens."""
        opened = self._opened
        packs = opened.val_plan.packs
        documents = sorted({segment.document for pack in packs for segment in pack})
        lengths = opened.val_reader.index.lengths[documents]
        if int(lengths.sum()) > max_tokens:
            return []
        return self._tokens(opened.val_reader, documents, max_tokens)

    def _tokens(
        self, reader: PackReader, documents: Sequence[int], max_tokens: int
    ) -> list[TokenDocument]:
        found = []
        for document in documents:
            max_tokens -= int(reader.index.lengths[document])
            if max_tokens < 0:
                break
            sample = reader.shards.open(str(reader.index.names[document]))
            mask = apply_train_on(sample.loss_mask, self._train_on)
            found.append(TokenDocument(sample.input_ids.tolist(), mask.tolist()))
        return found

    @property
    def _opened(self) -> _Opened:
        assert self._setup_result is not None, "call setup() first"
        return self._setup_result

    def _open_all(self) -> _Opened:
        shards = self._open(self._directory, self._max_samples)
        if self._val_directory is None:
            held_out = validation_documents(shards.index.prompt_hash, self._val_ratio)
            val_shards = shards
            val_documents = np.flatnonzero(held_out).tolist()
        else:
            held_out = np.zeros(len(shards.index), np.bool_)
            val_shards = self._open(Path(self._val_directory), None)
            val_documents = list(range(len(val_shards.index)))
            self._check_same_states(shards, val_shards)
        train_documents = tuple(np.flatnonzero(~held_out).tolist())
        train = shards.segment(train_documents, self._rule)
        if not train.segments:
            raise DataError(
                f"{self._directory}: found no supervised row in {len(train_documents)} training "
                f"documents (data.long_documents={self._rule.long_documents}), expected some. "
                "Raise max_seq_len, set data.long_documents=split, or add documents."
            )
        val_plan, val_report = self._plan_validation(val_shards, val_documents)
        return _Opened(
            shards=shards,
            train_documents=train_documents,
            train=train,
            reader=self._pack_reader(shards),
            val_reader=self._pack_reader(val_shards),
            val_plan=val_plan,
            val_report=val_report,
        )

    def _open(self, directory: Path, max_samples: int | None) -> Shards:
        return open_shards(
            directory,
            self._layout,
            self._declaration,
            train_on=self._train_on,
            max_samples=max_samples,
            cache=self._cache,
            bad_samples=self._bad_samples,
            num_workers=self._num_workers,
        )

    def _plan_validation(
        self, shards: Shards, documents: Iterable[int]
    ) -> tuple[EpochPlan, PackingReport]:
        rows = self._val_rule.max_seq_len
        segmentation = shards.segment(documents, self._val_rule)
        plan = validation_plan(segmentation.segments, rows, self._world_size)
        too_short = shards.index.too_short if self._val_directory is not None else 0
        return plan, packing_report(segmentation, plan, rows, too_short)

    def _check_same_states(self, shards: Shards, val_shards: Shards) -> None:
        ours, theirs = shards.declaration, val_shards.declaration
        if (ours.aux_layer_ids, ours.last_hidden) != (theirs.aux_layer_ids, theirs.last_hidden):
            raise DataError(
                f"{self._val_directory}: found states of layers {list(theirs.aux_layer_ids)} "
                f"(entering), last state {theirs.last_hidden}; expected {list(ours.aux_layer_ids)} "
                f"and {ours.last_hidden} as in {self._directory}. Set paths.val_shards to captures "
                "of the same layers."
            )

    def _pack_reader(self, shards: Shards) -> PackReader:
        return PackReader(shards.reader, shards.index, self._train_on, self._pin_memory)

    def _loader(
        self, plan: EpochPlan, reader: PackReader, max_seq_len: int, epoch: int
    ) -> WindowLoader:
        return WindowLoader(
            plan=plan,
            reader=reader,
            bad_samples=self._bad_samples,
            max_seq_len=max_seq_len,
            rank=self._rank,
            epoch=epoch,
            num_workers=self._num_workers,
            prefetch_windows=self._prefetch_windows,
        )

    def _log_setup(self, opened: _Opened) -> None:
        layout, dtype = self._layout, opened.shards.index.dtype
        row_bytes = (layout.num_aux_layers + 1) * layout.hidden_size * dtype.itemsize
        packs = (self._prefetch_windows + 1) * self._accumulate
        logger.info(
            "%d reader threads hold up to %d packs, %.2f GB of memory per rank",
            self._num_workers,
            packs,
            packs * self._rule.max_seq_len * row_bytes / 1e9,
        )
        for line in self.bad_samples:
            logger.warning("skipped: %s", line)
