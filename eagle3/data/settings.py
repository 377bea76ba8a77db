"""What the data module is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eagle3.data.declaration import Declaration
from eagle3.data.layout import StateLayout
from eagle3.data.packing import PackingRule
from eagle3.names import DataChange, LongDocuments, ReadMode, TrainOn


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Where the states are, how they are cut and dealt, and which part is this rank's."""

    directories: tuple[Path, ...]
    """Captures to train on, one or several."""
    weights: tuple[float, ...] = (1.0,)
    """How often an epoch takes each document of a directory; 0.5: every other one."""
    val_directory: Path | None = None
    """Explicit validation directory; None: prompts chosen from ``directories`` by hash."""
    cache: Path
    """Where indexes are kept, outside the data directories."""
    arrow: Path | None = None
    """The token ids and masks of a speculators directory; None: beside its states."""
    source_labels: Path | None = None
    """CSV file with sample_id,source; None: ``sources.csv`` of each directory, or its name."""
    declaration: Declaration
    """What the config says about the states."""
    layout: StateLayout
    """Sizes of the states."""
    max_seq_len: int
    """Rows of a training pack."""
    val_max_seq_len: int
    """Rows of a validation pack."""
    ttt_steps: int
    """TTT steps in training."""
    draft_steps: int
    """Draft steps in validation."""
    long_documents: LongDocuments
    """Treatment of training documents longer than a pack; validation splits."""
    split_context_tokens: int
    """Context rows of a split."""
    val_ratio: float
    """Share of prompts held out where ``val_directory`` is None."""
    train_on: TrainOn
    """Which tokens gate a loss."""
    max_samples: int | None = None
    """Use the first so many documents of each directory; None: all."""
    max_bad_samples: int
    """Bad samples before the run stops."""
    num_workers: int
    """Reader threads."""
    read_mode: ReadMode = ReadMode.auto
    """How bytes are read."""
    prefetch_windows: int
    """Optimizer windows read ahead."""
    on_change: DataChange = DataChange.refuse
    """What happens when a run is continued on other data."""
    accumulate: int
    """Packs of a rank in an optimizer step."""
    seed: int
    """Seeds the order of an epoch, together with its number."""
    rank: int = 0
    """Global rank."""
    world_size: int = 1
    """Number of ranks."""
    pin_memory: bool = False
    """Read into page-locked memory."""

    @property
    def rule(self) -> PackingRule:
        """How training documents are cut."""
        return PackingRule(
            self.max_seq_len, self.long_documents, self.split_context_tokens, self.ttt_steps
        )

    @property
    def val_rule(self) -> PackingRule:
        """How validation documents are cut: all of each is kept."""
        return PackingRule(
            self.val_max_seq_len, LongDocuments.split, self.split_context_tokens, self.draft_steps
        )
