"""Response tokens of captured directories, and how much of them draft vocabularies cover."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from eagle3.data.bad_samples import BadSamples
from eagle3.data.formats import open_store
from eagle3.data.index import build_index
from eagle3.data.layout import StateLayout
from eagle3.data.masks import Runs
from eagle3.data.reading import StateReader
from eagle3.data.tokenizer_fingerprint import Tokenizer, config_tokens
from eagle3.data.vocab import VocabMap
from eagle3.data.vocab_counts import token_frequencies
from eagle3.errors import ConfigError, DataError
from eagle3.inspection.stated import GivenFacts, find_sizes
from eagle3.names import TrainOn


@dataclass(frozen=True)
class Counted:
    """Response tokens of one or several directories."""

    counts: Int[Tensor, " W"]
    """int64, supervised tokens by id."""
    documents: int
    fingerprint: str
    """Of the set of documents, as in :class:`eagle3.data.corpus.Corpus`."""
    bad_samples: tuple[str, ...]
    """One line per sample that could not be indexed and was left out."""

    @property
    def total(self) -> int:
        """Supervised tokens."""
        return int(self.counts.sum())

    @property
    def distinct(self) -> int:
        """Ids that occur."""
        return int(self.counts.count_nonzero())


@dataclass(frozen=True)
class SizeCoverage:
    """What a map of one size covers."""

    size: int
    covered_tokens: int
    outside_tokens: int
    coverage: float
    """Share of the supervised tokens."""
    gain: float
    """Coverage over that of the size before; 0 for the first."""
    gain_per_1000: float
    """The same per 1,000 draft tokens more."""


def count_directories(
    directories: Sequence[Path],
    given: GivenFacts,
    *,
    verifier: Path | None,
    arrow: Path | None,
    train_on: TrainOn,
    cache: Path,
    num_workers: int,
    max_bad_samples: int,
) -> Counted:
    """Count the supervised tokens of all documents of ``directories``.

    Args:
        directories: captures in any format.
        given: sizes that the user says.
        verifier: its directory; None: sizes come from elsewhere.
        arrow: token ids and masks of captures of speculators 0.9; None: found beside the states.
        train_on: which tokens count.
        cache: where indexes are kept.
        num_workers: threads.
        max_bad_samples: bad samples that are left out; one more stops.

    Raises:
        DataError: a directory cannot be used, there are too many bad samples, or the vocabularies
            differ in size.
        ConfigError: nobody says how large the vocabulary is.
    """
    counts: Tensor | None = None
    bad_samples, hashes = BadSamples(max_bad_samples, "--max-bad-samples"), []
    for directory in directories:
        sizes = find_sizes(directory, given, verifier)
        layout = sizes.with_vocab()
        if counts is None:
            counts = torch.zeros(layout.vocab_size, dtype=torch.int64)
        if len(counts) != layout.vocab_size:
            raise DataError(
                f"{directory}: found a vocabulary of {layout.vocab_size:,} tokens "
                f"({sizes.said_by['vocab_size']}), expected {len(counts):,} as for "
                f"{directories[0]}. Count captures of one verifier together."
            )
        store = open_store(directory, layout, arrow)
        index = build_index(store, cache, bad_samples, num_workers)
        runs = index.runs.train_on(train_on, index.lengths)
        documents = _Documents(StateReader(store, index), runs)
        counts += token_frequencies(documents, range(len(index)), num_workers)
        hashes.append(index.sample_hash)
    assert counts is not None, "no directory"
    together = np.sort(np.concatenate(hashes))
    fingerprint = hashlib.blake2b(together.tobytes(), digest_size=8).hexdigest()
    return Counted(counts, len(together), fingerprint, tuple(bad_samples.lines))


@dataclass(frozen=True)
class _Documents:
    """Token ids and masks of one directory, whatever its states are."""

    reader: StateReader
    runs: Runs

    @property
    def layout(self) -> StateLayout:
        return self.reader.layout

    def input_ids(self, document: int) -> Tensor:
        return self.reader.input_ids(document)

    def loss_mask(self, document: int) -> Tensor:
        length = int(self.reader.index.lengths[document])
        return torch.from_numpy(self.runs.mask(document, length))


def always_kept(
    tokenizer: Tokenizer | None, verifier: Path | None, wanted: Collection[int], vocab_size: int
) -> frozenset[int]:
    """Added tokens, the ends that the verifier's configs name, and the ``wanted`` ids.

    A tokenizer may have added tokens that the verifier has no row for: they are left out.

    Raises:
        ConfigError: a wanted id is outside the vocabulary.
    """
    outside = [token for token in wanted if not 0 <= token < vocab_size]
    if outside:
        raise ConfigError(f"--keep: found id {outside[0]}, expected ids 0..{vocab_size - 1}.")
    added = frozenset() if tokenizer is None else frozenset(tokenizer.added.values())
    ends = frozenset() if verifier is None else config_tokens(verifier)
    special = {token for token in added | ends if 0 <= token < vocab_size}
    return frozenset(special | set(wanted))


def size_coverages(
    counts: Int[Tensor, " W"], sizes: Iterable[int], keep: Collection[int]
) -> tuple[SizeCoverage, ...]:
    """Maps of ``sizes``, ascending; those of W tokens and more are one, the whole vocabulary.

    Raises:
        ConfigError: a size is smaller than the number of tokens to keep.
    """
    total = int(counts.sum())
    found: list[SizeCoverage] = []
    for size in sorted({min(size, len(counts)) for size in sizes}):
        vocab_map = VocabMap.from_frequencies(counts, size, len(counts), keep)
        covered = int(counts[vocab_map.t2d].sum())
        gain = gain_per_1000 = 0.0
        if found:
            gain = (covered - found[-1].covered_tokens) / max(total, 1)
            gain_per_1000 = 1000 * gain / (size - found[-1].size)
        coverage = covered / max(total, 1)
        found.append(SizeCoverage(size, covered, total - covered, coverage, gain, gain_per_1000))
    return tuple(found)


def table_lines(sizes: Sequence[SizeCoverage]) -> list[str]:
    """Coverage of each size, and what the step to it brings."""
    lines = ["draft vocabulary   coverage    tokens outside       gain   gain per 1,000 more"]
    for number, size in enumerate(sizes):
        line = f"{size.size:16,} {size.coverage:10.3%} {size.outside_tokens:17,}"
        if number:
            line += f" {100 * size.gain:+9.3f}% {100 * size.gain_per_1000:+20.4f}%"
        lines.append(line)
    return lines
