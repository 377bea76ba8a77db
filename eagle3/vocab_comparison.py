"""An existing vocabulary map beside one that is built from the responses at hand."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from eagle3.data.tokenizer_fingerprint import Tokenizer
from eagle3.data.vocab import VocabMap
from eagle3.data.vocab_files import MapOrigin, check_tokenizer, read_origin, read_vocab_map
from eagle3.errors import DataError

_NAMED = 10


@dataclass(frozen=True)
class TokenCount:
    """A token and how often responses hold it."""

    token: int
    spelling: str
    """As the tokenizer's vocabulary has it; the id where no tokenizer was given."""
    count: int


@dataclass(frozen=True)
class Difference:
    """Tokens that one map has and the other has not."""

    tokens: int
    occurrences: int
    """How often responses hold them, together."""
    first: tuple[TokenCount, ...]
    """The most frequent ones."""


@dataclass(frozen=True)
class Comparison:
    """An old map, and one rebuilt at its size."""

    path: str
    size: int
    origin: MapOrigin
    tokenizer: str
    """A line about its tokenizer and the verifier's."""
    counted_tokens: int
    """Supervised tokens of the responses."""
    coverage: float
    rebuilt_coverage: float
    only_rebuilt: Difference
    only_old: Difference
    missing_kept: Difference
    """Tokens to keep always that the old map lacks."""

    def lines(self) -> list[str]:
        """The comparison for people."""
        gain = self.rebuilt_coverage - self.coverage
        origin = self.origin
        counted = "" if origin.counted_tokens is None else f" ({origin.counted_tokens:,} tokens)"
        lines = [
            f"{self.path}: {self.size:,} tokens cover {self.coverage:.3%} of these responses; "
            f"rebuilt at this size {self.rebuilt_coverage:.3%} ({100 * gain:+.3f}%)",
            f"  built on data {origin.data_fingerprint or 'not recorded'}{counted}",
            f"  {self.tokenizer}",
            self._line("it lacks, and the rebuilt map has", self.only_rebuilt),
            self._line("it has, and the rebuilt map lacks", self.only_old),
        ]
        if self.missing_kept.tokens:
            lines.append(self._line("special tokens that it lacks", self.missing_kept))
        return lines

    def _line(self, title: str, difference: Difference) -> str:
        share = difference.occurrences / max(self.counted_tokens, 1)
        names = ", ".join(f"{t.spelling} x{t.count:,}" for t in difference.first)
        return (
            f"  {title}: {difference.tokens:,} tokens, {difference.occurrences:,} occurrences "
            f"({share:.3%})" + (f": {names}" if names else "")
        )


def compare_map(
    path: Path, counts: Int[Tensor, " W"], keep: Collection[int], tokenizer: Tokenizer | None
) -> Comparison:
    """Judge the map at ``path`` by the supervised tokens ``counts``, int64.

    Args:
        path: a map of any size.
        counts: by verifier id.
        keep: ids that the rebuilt map holds whatever their count.
        tokenizer: the verifier's; None: not known.

    Raises:
        DataError: the map cannot be read, contradicts itself, or is of another tokenizer or
            vocabulary.
    """
    old = read_vocab_map(path)
    if old.verifier_size != len(counts):
        raise DataError(
            f"{path}: key 't2d': found a vocabulary of {old.verifier_size:,} tokens, expected "
            f"{len(counts):,}, the verifier's. It is the map of another verifier."
        )
    if tokenizer is None:
        line = "tokenizer of the vocabulary map: not compared; give --verifier or --tokenizer"
    else:
        line = check_tokenizer(path, tokenizer.path)
    rebuilt = VocabMap.from_frequencies(counts, old.draft_size, len(counts), keep)
    kept = torch.zeros_like(old.t2d)
    kept[sorted(keep)] = True
    spelling = {} if tokenizer is None else tokenizer.spelling()
    total = max(int(counts.sum()), 1)
    return Comparison(
        path=str(path),
        size=old.draft_size,
        origin=read_origin(path),
        tokenizer=line,
        counted_tokens=int(counts.sum()),
        coverage=int(counts[old.t2d].sum()) / total,
        rebuilt_coverage=int(counts[rebuilt.t2d].sum()) / total,
        only_rebuilt=_difference(rebuilt.t2d & ~old.t2d, counts, spelling),
        only_old=_difference(old.t2d & ~rebuilt.t2d, counts, spelling),
        missing_kept=_difference(kept & ~old.t2d, counts, spelling),
    )


def _difference(
    chosen: Bool[Tensor, " W"], counts: Int[Tensor, " W"], spelling: dict[int, str]
) -> Difference:
    ids = chosen.nonzero()[:, 0]
    found = counts[ids]
    order: Sequence[int] = found.argsort(descending=True, stable=True)[:_NAMED].tolist()
    first = tuple(
        TokenCount(int(ids[k]), spelling.get(int(ids[k]), str(int(ids[k]))), int(found[k]))
        for k in order
    )
    return Difference(len(ids), int(found.sum()), first)
