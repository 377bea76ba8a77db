"""Lengths and masks of the documents of a rehearsal: those of real ones, without their states."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from eagle3.config import Config
from eagle3.data.bad_samples import BadSamples
from eagle3.data.declaration import Declaration
from eagle3.data.layout import StateLayout
from eagle3.data.masks import Runs
from eagle3.data.shards import open_shards

TYPICAL = "a log-normal law with the mean of 37,312 samples of Kimi-K2.5, 2,353 tokens"
_QUANTILES = (
    29, 315, 428, 518, 598, 676, 756, 837, 922, 1000, 1083, 1168, 1264, 1354, 1457, 1561, 1675,
    1809, 1945, 2090, 2251, 2427, 2633, 2850, 3098, 3392, 3746, 4178, 4713, 5475, 6654, 8192, 8192,
)  # fmt: skip
"""Tokens of a sample at every 32nd part of that law, which is cut at 8,192."""
_PROMPT_SHARES = (0.1, 0.9)
"""Of a document, least and most; nothing is known of the prompts."""


@dataclass(frozen=True, eq=False)
class Outlines:
    """D documents of which only the outline is known."""

    lengths: NDArray[np.int64]
    """[D], tokens."""
    runs: Runs
    """Supervised tokens."""
    origin: str
    """Whose lengths these are, for people."""

    def __len__(self) -> int:
        return len(self.lengths)


def outlines(config: Config) -> Outlines:
    """At most ``rehearsal.samples`` outlines, drawn by ``seed``.

    From the indexes of ``paths.shards`` or ``data.mixture`` where these are set, masks included;
    else from a typical distribution, each with one prompt and one answer.

    Raises:
        DataError: a directory that is set cannot be opened; as the real run would raise.
    """
    rng = np.random.default_rng(config.seed)
    directories = [Path(part.path) for part in config.data.mixture]
    if config.paths.shards is not None:
        directories.append(Path(config.paths.shards))
    if directories:
        return _of_directories(config, directories, rng)
    return typical(config.rehearsal.samples, rng)


def typical(count: int, rng: np.random.Generator) -> Outlines:
    """``count`` outlines from a typical distribution, by its quantiles."""
    at = rng.uniform(0, len(_QUANTILES) - 1, count)
    lengths = np.interp(at, np.arange(len(_QUANTILES)), _QUANTILES).astype(np.int64)
    prompts = np.maximum((lengths * rng.uniform(*_PROMPT_SHARES, count)).astype(np.int64), 1)
    runs = Runs(np.arange(count + 1), np.stack([prompts, lengths], axis=1))
    return Outlines(lengths, runs, TYPICAL)


def _of_directories(config: Config, directories: list[Path], rng: np.random.Generator) -> Outlines:
    model, data = config.model, config.data
    ids = data.aux_layer_ids
    opened = [
        open_shards(
            directory,
            StateLayout(model.num_aux_layers, model.hidden_size, model.vocab_size),
            Declaration(
                None if ids is None else tuple(ids), data.layer_id_convention, data.last_hidden
            ),
            train_on=data.train_on,
            max_samples=data.max_samples,
            cache=config.paths.cache,
            bad_samples=BadSamples(data.max_bad_samples),
            num_workers=data.num_workers,
            arrow=None if config.paths.arrow is None else Path(config.paths.arrow),
        )
        for directory in directories
    ]
    lengths = np.concatenate([shards.index.lengths for shards in opened])
    runs = Runs.concatenate([shards.index.runs for shards in opened])
    count = min(config.rehearsal.samples, len(lengths))
    chosen = np.sort(rng.choice(len(lengths), count, replace=False))
    taken = [runs.bounds[runs.offsets[d] : runs.offsets[d + 1]] for d in chosen.tolist()]
    names = ", ".join(str(directory) for directory in directories)
    return Outlines(lengths[chosen], Runs.stack(taken), f"{len(lengths):,} samples of {names}")
