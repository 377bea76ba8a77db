"""Look at directories of captured states: ``python -m eagle3.shards inspect DIR``.

``inspect`` judges a directory, ``verify`` compares its bytes with their checksums, ``convert``
writes it in the native format, ``vocab`` counts its responses for a draft vocabulary.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from eagle3 import vocab_report
from eagle3.errors import UserError
from eagle3.inspection import command as inspect
from eagle3.inspection.stated import GivenFacts, find_sizes
from eagle3.names import LastHidden, LayerIdConvention
from eagle3.shards_commands import convert, verify
from eagle3.shards_commands.options import as_options, whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0; 1 when the command found something that is wrong; 2 for wrong arguments or input.
    """
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    args = _parser().parse_args(arguments)
    try:
        code = _run(args)
        sys.stdout.flush()  # a closed pipe is noticed here, not after the end
        return code
    except UserError as error:
        sys.stdout.flush()
        vocab_map = "--compare" if args.command == "vocab" else "--vocab-map"
        print(f"error: {as_options(str(error), vocab_map)}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> int:
    if args.command == "vocab":
        return vocab_report.run(args)
    given = _given(args)
    if args.command == "inspect":
        return inspect.run(args, given)
    sizes = find_sizes(args.directory, given, args.verifier)
    if args.command == "convert":
        return convert.run(args, sizes.with_vocab(), given.declaration)
    return verify.run(args, sizes.layout, given.declaration)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m eagle3.shards", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, add_arguments, description in (
        ("inspect", inspect.add_arguments, "what is in a directory, and whether to train on it"),
        ("verify", verify.add_arguments, "read everything and compare it with its checksums"),
        ("convert", convert.add_arguments, "write a directory in the native format"),
    ):
        command = commands.add_parser(name, help=description, description=description)
        _add_directory(command)
        add_arguments(command)
    vocab = commands.add_parser(
        "vocab", help=vocab_report.DESCRIPTION, description=vocab_report.DESCRIPTION
    )
    vocab_report.add_arguments(vocab)
    return parser


def _add_directory(parser: argparse.ArgumentParser) -> None:
    """The directory, and what one may have to say about it."""
    workers = min(8, os.cpu_count() or 1)
    parser.add_argument("directory", type=Path, metavar="DIR", help="captured states")
    parser.add_argument("--verifier", type=Path, metavar="DIR", help="the verifier's directory")
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(".cache/eagle3"),
        metavar="DIR",
        help="where indexes are kept (%(default)s)",
    )
    parser.add_argument(
        "--num-workers",
        type=whole(1),
        default=workers,
        metavar="N",
        help="threads that read (%(default)s)",
    )
    parser.add_argument(
        "--arrow",
        type=Path,
        metavar="DIR",
        help="Arrow data set of speculators 0.9 (in the directory or its parent)",
    )
    parser.add_argument(
        "--source-labels",
        type=Path,
        metavar="CSV",
        help="source labels (sources.csv in the directory)",
    )
    facts = parser.add_argument_group("facts that the directory does not say")
    facts.add_argument(
        "--aux-layer-ids",
        type=inspect.numbers,
        metavar="K,K",
        help="ids of the aux layers, low to high",
    )
    facts.add_argument(
        "--layer-id-convention", choices=_names(LayerIdConvention), help="what these ids count"
    )
    facts.add_argument("--last-hidden", choices=_names(LastHidden), help="kind of the last state")
    facts.add_argument("--num-aux-layers", type=whole(1), metavar="N")
    facts.add_argument("--hidden-size", type=whole(1), metavar="N")
    facts.add_argument("--vocab-size", type=whole(1), metavar="N", help="of the verifier")


def _names(choices: type[StrEnum]) -> list[str]:
    return [str(name) for name in choices]


def _given(args: argparse.Namespace) -> GivenFacts:
    convention, last_hidden = args.layer_id_convention, args.last_hidden
    return GivenFacts(
        aux_layer_ids=args.aux_layer_ids,
        layer_id_convention=None if convention is None else LayerIdConvention(convention),
        last_hidden=None if last_hidden is None else LastHidden(last_hidden),
        num_aux_layers=args.num_aux_layers,
        hidden_size=args.hidden_size,
        vocab_size=args.vocab_size,
    )


if __name__ == "__main__":
    sys.exit(main())
