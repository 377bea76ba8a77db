"""``python -m eagle3.shards verify DIR``: are the bytes those that were written?"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path

from eagle3.data.declaration import Declaration
from eagle3.data.layout import StateLayout
from eagle3.shards_commands.options import as_options, whole
from eagle3.verify import verify

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command; the directory and its facts are added by the caller."""
    parser.add_argument(
        "--sample",
        type=whole(1),
        metavar="N",
        help="look at N samples, chosen at random; without it at everything",
    )
    parser.add_argument("--seed", type=int, default=0, help="of that choice (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")


def run(args: argparse.Namespace, layout: StateLayout, declaration: Declaration) -> int:
    """Print the table.

    Returns:
        0; 1 when something is wrong.
    """
    del declaration  # what the states mean plays no role for their bytes
    report = verify(
        args.directory,
        layout,
        logger.info,
        arrow=args.arrow,
        num_samples=args.sample,
        seed=args.seed,
        num_workers=args.num_workers,
    )
    print(as_options("\n".join(report.lines())))
    if args.json is not None:
        args.json.write_text(json.dumps(report.as_dict(), indent=2) + "\n", encoding="utf-8")
    return 1 if report.damages else 0
