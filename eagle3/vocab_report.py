"""``shards vocab``: which draft vocabulary covers how much of the responses, and maps of any size.

Only token ids and masks are read, so it takes seconds where the states are terabytes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3.data.tokenizer_fingerprint import Tokenizer, read_tokenizer
from eagle3.data.vocab import VocabMap
from eagle3.data.vocab_files import MapOrigin, save_vocab_map
from eagle3.errors import ConfigError, DataError
from eagle3.inspection.stated import GivenFacts
from eagle3.names import TrainOn
from eagle3.shards_commands.options import as_options, whole
from eagle3.vocab_comparison import Comparison, compare_map
from eagle3.vocab_coverage import (
    Counted,
    SizeCoverage,
    always_kept,
    count_directories,
    size_coverages,
    table_lines,
)

DESCRIPTION = "count response tokens, show the coverage of draft vocabularies, write a map"
DEFAULT_SIZES = (8192, 16384, 32768, 65536)
JSON_VERSION = 1
_SIZE = re.compile(r"(\d+)(k?)")


@dataclass(frozen=True)
class VocabReport:
    """Everything that the command finds out."""

    directories: tuple[str, ...]
    train_on: str
    documents: int
    bad_samples: tuple[str, ...]
    """Path and reason of samples that were left out."""
    tokens: int
    """Supervised ones."""
    distinct_tokens: int
    vocab_size: int
    data_fingerprint: str
    tokenizer_fingerprint: str | None
    always_kept: int
    """Special tokens and those of ``--keep``."""
    always_kept_unseen: int
    """Of them, those that no response holds."""
    sizes: tuple[SizeCoverage, ...]
    comparison: Comparison | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"json_version": JSON_VERSION, **asdict(self)}

    def lines(self) -> list[str]:
        """The report for people."""
        return [
            *(f"warning: left out: {as_options(line)}" for line in self.bad_samples),
            f"{self.tokens:,} response tokens (train_on={self.train_on}) in {self.documents:,} "
            f"documents of {len(self.directories)} director"
            f"{'y' if len(self.directories) == 1 else 'ies'}",
            f"{self.distinct_tokens:,} of {self.vocab_size:,} tokens occur; data fingerprint "
            f"{self.data_fingerprint}; tokenizer {self.tokenizer_fingerprint or 'not recorded'}",
            f"always kept: {self.always_kept:,} tokens, {self.always_kept_unseen:,} of them in no "
            "response" + ("" if self.always_kept else " (give --verifier to keep special tokens)"),
            "",
            *table_lines(self.sizes),
            *(["", *self.comparison.lines()] if self.comparison else []),
        ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All options of the sub-command."""
    parser.add_argument("directories", metavar="DIR", nargs="+", type=Path)
    parser.add_argument(
        "--sizes",
        type=_sizes,
        default=DEFAULT_SIZES,
        metavar="N,N",
        help="default: 8k,16k,32k,64k; 8k is 8,192",
    )
    parser.add_argument(
        "--write", type=_size, metavar="SIZE", help="write a map of SIZE tokens, such as 32k"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.safetensors", help="where to write it")
    parser.add_argument("--compare", type=Path, metavar="MAP", help="coverage of an existing map")
    parser.add_argument("--verifier", type=Path, metavar="DIR", help="sizes and special tokens")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="instead of the verifier's")
    parser.add_argument(
        "--keep", type=_numbers, default=(), metavar="ID,ID", help="token ids to keep always"
    )
    parser.add_argument("--arrow", type=Path, metavar="DIR", help="data set of speculators 0.9")
    parser.add_argument("--vocab-size", type=whole(1), metavar="N", help="of the verifier")
    parser.add_argument(
        "--train-on", type=TrainOn, choices=list(TrainOn), default=TrainOn.assistant
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument(
        "--max-bad-samples",
        type=whole(0),
        default=10,
        metavar="N",
        help="left out; one more stops (%(default)s)",
    )
    parser.add_argument("--cache", type=Path, default=Path(".cache/eagle3"), metavar="DIR")
    workers = min(8, os.cpu_count() or 1)
    parser.add_argument("--num-workers", type=whole(1), default=workers, metavar="N")


def run(args: argparse.Namespace) -> int:
    """Count, print the table, write what was asked for; returns the exit code.

    Raises:
        UserError: something that the user can mend.
    """
    _check_out(args.write, args.out)
    source = args.tokenizer or args.verifier
    tokenizer = None if source is None else read_tokenizer(source)
    counted = count_directories(
        args.directories,
        GivenFacts(vocab_size=args.vocab_size),
        verifier=args.verifier,
        arrow=args.arrow,
        train_on=args.train_on,
        cache=args.cache,
        num_workers=args.num_workers,
        max_bad_samples=args.max_bad_samples,
    )
    if args.write is not None and args.write > len(counted.counts):
        raise ConfigError(
            f"--write: found {args.write:,}, expected at most {len(counted.counts):,}, the size of "
            "the verifier's vocabulary."
        )
    keep = always_kept(tokenizer, args.verifier, args.keep, len(counted.counts))
    comparison = None
    if args.compare is not None:
        comparison = compare_map(args.compare, counted.counts, keep, tokenizer)
    report = VocabReport(
        directories=tuple(map(str, args.directories)),
        train_on=str(args.train_on),
        documents=counted.documents,
        bad_samples=counted.bad_samples,
        tokens=counted.total,
        distinct_tokens=counted.distinct,
        vocab_size=len(counted.counts),
        data_fingerprint=counted.fingerprint,
        tokenizer_fingerprint=None if tokenizer is None else tokenizer.fingerprint,
        always_kept=len(keep),
        always_kept_unseen=sum(int(counted.counts[token]) == 0 for token in keep),
        sizes=size_coverages(counted.counts, args.sizes, keep),
        comparison=comparison,
    )
    for line in report.lines():
        print(line)
    if args.out is not None:
        print(_write_map(args.out, args.write, counted, keep, tokenizer))
    if args.json is not None:
        _write_json(args.json, report)
    return 0


def _check_out(size: int | None, out: Path | None) -> None:
    if (size is None) != (out is None):
        raise ConfigError(
            "--write and --out: found one without the other, expected both: --write SIZE --out "
            "FILE.safetensors."
        )
    if out is not None and out.suffix != ".safetensors":
        raise ConfigError(
            f"--out: found {out}, expected a name that ends in .safetensors, the form in which "
            "maps are written."
        )


def _write_map(
    path: Path, size: int, counted: Counted, keep: Iterable[int], tokenizer: Tokenizer | None
) -> str:
    counts = counted.counts
    vocab_map = VocabMap.from_frequencies(counts, size, len(counts), keep)
    origin = MapOrigin(
        data_fingerprint=counted.fingerprint,
        tokenizer_fingerprint=None if tokenizer is None else tokenizer.fingerprint,
        tokenizer_name=None if tokenizer is None else tokenizer.name,
        counted_tokens=counted.total,
    )
    save_vocab_map(path, vocab_map, origin)
    coverage = float(counts[vocab_map.t2d].sum() / max(counted.total, 1))
    return (
        f"wrote {path}: {vocab_map.draft_size:,} of {vocab_map.verifier_size:,} tokens, "
        f"{coverage:.3%} of the responses. Use it with paths.vocab_map={path} "
        f"model.draft_vocab_size={vocab_map.draft_size}"
    )


def _write_json(path: Path, report: VocabReport) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report.as_dict(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written ({error}). Give --json another path."
        ) from error


def _size(text: str) -> int:
    """``8192`` or ``8k``, a size of at least 1."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or not int(found[1]):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a size such as 8192 or 8k")
    return int(found[1]) * (1024 if found[2] else 1)


def _sizes(text: str) -> tuple[int, ...]:
    """``8192,16k`` as sizes."""
    return tuple(_size(part) for part in text.split(",") if part)


def _numbers(text: str) -> tuple[int, ...]:
    """``8192,16384`` as numbers."""
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected numbers: 8192,16384") from None
