"""``python -m eagle3.shards inspect``: its options, and what comes of an audit."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from enum import StrEnum
from pathlib import Path
from typing import Any

from eagle3.errors import DataError
from eagle3.inspection.audit import AuditRequest, run_audit
from eagle3.inspection.facts import Audit
from eagle3.inspection.stated import GivenFacts
from eagle3.inspection.table import table
from eagle3.names import LongDocuments, TrainOn
from eagle3.shards_commands.options import whole

logger = logging.getLogger(__name__)
_DEFAULTS = AuditRequest(Path(), Path())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``inspect``, beside those that all commands on a directory have."""
    any_number: dict[str, Any] = {"type": whole(0), "metavar": "N"}
    number: dict[str, Any] = {"type": whole(1), "metavar": "N"}
    look = parser.add_argument_group("how closely to look")
    _add(look, "samples", "documents whose states are read, spread evenly", **number)
    _add(look, "shown", "documents to print, supervised tokens marked", "--show", **any_number)
    _add(look, "device", "where the verifier's head is applied", choices=["cpu", "cuda"])
    training = parser.add_argument_group("settings of the training it is for")
    training.add_argument("--vocab-map", type=Path, metavar="PATH", help="draft vocabulary")
    training.add_argument(
        "--max-seq-len",
        type=numbers,
        default=_DEFAULTS.max_seq_lens,
        metavar="N,N",
        help=f"rows of a pack to try ({','.join(map(str, _DEFAULTS.max_seq_lens))})",
    )
    _add(training, "long_documents", "split, truncate or drop", choices=_names(LongDocuments))
    _add(training, "split_context_tokens", "context rows of a split", **any_number)
    _add(training, "ttt_steps", "steps of the unroll", **number)
    _add(training, "train_on", "which tokens gate a loss", choices=_names(TrainOn))
    _add(training, "val_ratio", "share of prompts held out", type=float, metavar="X")
    _add(training, "tokens_per_s", "speed to state the read rate for", type=float, metavar="X")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all facts as JSON")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the facts as a PNG")


def _add(
    group: argparse._ArgumentGroup, field: str, text: str, option: str = "", **how: Any
) -> None:
    """An option with the default of the field of :class:`AuditRequest`, shown in its help."""
    group.add_argument(
        option or f"--{field.replace('_', '-')}",
        dest=field,
        default=getattr(_DEFAULTS, field),
        help=f"{text} (%(default)s)",
        **how,
    )


def _names(choices: type[StrEnum]) -> list[str]:
    return [str(name) for name in choices]


def run(args: argparse.Namespace, given: GivenFacts) -> int:
    """Print the table, write what was asked for; 1 when training should not start on this."""
    audit = run_audit(_request(args, given), logger.info)
    print(table(audit, colour=sys.stdout.isatty()))
    if args.json is not None:
        _write_json(audit, args.json)
    if args.figure is not None:
        from eagle3.inspection.figure import draw_audit  # a second of imports for the picture only

        draw_audit(audit, args.figure)
    return 1 if audit.stops else 0


def numbers(text: str) -> tuple[int, ...]:
    """``2048,4096`` as numbers.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected whole numbers with commas between them, such as 2,30,58"
        ) from error


def _request(args: argparse.Namespace, given: GivenFacts) -> AuditRequest:
    return AuditRequest(
        directory=args.directory,
        cache=args.cache,
        verifier=args.verifier,
        vocab_map=args.vocab_map,
        given=given,
        arrow=args.arrow,
        source_labels=args.source_labels,
        samples=args.samples,
        shown=args.shown,
        max_seq_lens=args.max_seq_len,
        long_documents=LongDocuments(args.long_documents),
        split_context_tokens=args.split_context_tokens,
        ttt_steps=args.ttt_steps,
        train_on=TrainOn(args.train_on),
        val_ratio=args.val_ratio,
        tokens_per_s=args.tokens_per_s,
        num_workers=args.num_workers,
        device=args.device,
    )


def _write_json(audit: Audit, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(audit.as_dict(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written ({error}). Give --json another path."
        ) from error
