"""``python -m eagle3.shards convert DIR OUT``: any readable format to the native one."""

from __future__ import annotations

import argparse
import logging
import re
from pathlib import Path

from eagle3.convert import ConvertRequest, convert
from eagle3.data.declaration import Declaration
from eagle3.data.disk import size
from eagle3.data.layout import StateLayout
from eagle3.data.native_writer import SHARD_BYTES
from eagle3.shards_commands.options import as_options, whole

logger = logging.getLogger(__name__)
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([kMGT]?)(i?)B?")
_POWERS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command; the directory and its facts are added by the caller."""
    parser.add_argument("out", type=Path, metavar="OUT", help="the new directory")
    parser.add_argument(
        "--shard-bytes",
        type=num_bytes,
        default=SHARD_BYTES,
        metavar="SIZE",
        help="about the size of a shard, such as 2GB or 500MB (2GB)",
    )
    parser.add_argument(
        "--max-samples", type=whole(1), metavar="N", help="convert only the first N samples"
    )
    parser.add_argument(
        "--max-bad-samples",
        type=whole(0),
        default=0,
        metavar="N",
        help="leave out up to N unusable samples, and list them (%(default)s)",
    )


def run(args: argparse.Namespace, layout: StateLayout, declaration: Declaration) -> int:
    """Convert and print a summary; 0."""
    request = ConvertRequest(
        source=args.directory,
        out=args.out,
        layout=layout,
        declaration=declaration,
        cache=args.cache,
        verifier=args.verifier,
        arrow=args.arrow,
        source_labels=args.source_labels,
        shard_bytes=args.shard_bytes,
        num_workers=args.num_workers,
        max_samples=args.max_samples,
        max_bad_samples=args.max_bad_samples,
    )
    summary = convert(request, logger.info)
    print(
        f"{args.out}: {summary.num_samples:,} samples, {summary.num_tokens:,} tokens, "
        f"{size(summary.num_bytes)}, fingerprint {summary.fingerprint}; {summary.num_kept:,} "
        f"samples were there already; left out: {len(summary.skipped):,} unusable, "
        f"{summary.too_short:,} of less than two tokens; {summary.seconds:.1f} s"
    )
    for line in summary.skipped:
        print(f"  left out: {as_options(line)}")
    return 0


def num_bytes(text: str) -> int:
    """``2GB``, ``500 MB``, ``1.5GiB`` or a plain number of bytes.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a size such as 2GB or 500MB")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** _POWERS[found[2]])
