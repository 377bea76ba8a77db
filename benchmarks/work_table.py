"""Work and memory of a drafter for Kimi-K2.5, from formulas: ours, and a plain trainer's.

    python benchmarks/work_table.py [--quick] [--check] [--out FILE]

*Work and bytes*: GFLOP and bytes kept for backward of a packed token, forward and backward of a
pack of 4,096 rows, documents of 2,353 rows, each a masked prompt and an answer. The peer computes
all rows and all parts at every step and makes the verifier's logits once; its attention stays
within documents, and its loss is a fused kernel (see ``eagle3/planning/work.py``). Bytes are those
that grow with the rows: activations, and what the loss holds at once.

*Memory*: the plan of ``experiment=kimi_100k`` at 4,096 rows, and the longest ``max_seq_len`` that
cards of some sizes take, when half or all rows of a pack are supervised.

Nothing runs on a device: tests/planning holds the work against PyTorch's counter, exactly, and the
memory against peaks measured on CPU. What a card does differently is not measured. ``--quick``:
three TTT steps and half the rows supervised.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from eagle3 import __version__
from eagle3.compose import compose_config
from eagle3.config import Config
from eagle3.names import Recompute
from eagle3.planning import (
    PackRows,
    Step,
    kept_bytes,
    longest_max_seq_len,
    peer_bytes,
    peer_work,
    plan,
    work,
)

ROWS, DOCUMENT_ROWS = 4096, 2353
TTT_STEPS, SHARES = (3, 5, 7), (0.3, 0.5, 0.7, 1.0)
CARDS_GB, PLANNED_SHARES = (80, 96, 141, 180), (0.5, 1.0)
GB = 10**9

AT_LEAST = {
    "flops_s3_r30": 2.8,
    "flops_s3_r50": 1.9,
    "flops_s7_r50": 2.1,
    "flops_s3_r100": 1.05,
    "bytes_s3_r50": 2.0,
    "bytes_s7_r50": 2.0,
    "rows_96gb_recompute_over_kept": 1.1,
}


def main() -> int:
    args = arguments()
    config = compose_config(["experiment=kimi_100k"])
    steps, shares = ((3,), (0.5,)) if args.quick else (TTT_STEPS, SHARES)
    ratios = work_table(config, steps, shares)
    ratios |= memory_table(config, PLANNED_SHARES[:1] if args.quick else PLANNED_SHARES)
    return finish(ratios, args)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a line of each table")
    parser.add_argument("--check", action="store_true", help="exit 1 outside the thresholds")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    return parser.parse_args()


def work_table(
    config: Config, ttt_steps: tuple[int, ...], shares: tuple[float, ...]
) -> dict[str, float]:
    """One line per number of TTT steps and share of supervised rows."""
    print(f"a packed token of {ROWS:,} rows, documents of {DOCUMENT_ROWS:,}")
    print(f"{'TTT':>4} {'supervised':>11} {'GFLOP':>7} {'peer':>7} {'ratio':>6} "
          f"{'kept KB':>9} {'mlp again':>10} {'peer':>7} {'ratio':>6}")  # fmt: skip
    ratios = {}
    for steps in ttt_steps:
        for share in shares:
            pack = PackRows.typical(ROWS, DOCUMENT_ROWS, share)
            step = replace(Step.of_config(config, pack), ttt_steps=steps)
            again = replace(step, compute=replace(step.compute, recompute=Recompute.mlp))
            flops, their_flops = work(step).per_row, peer_work(step).per_row
            kept, kept_again, theirs = (
                total / step.rows
                for total in (kept_bytes(step), kept_bytes(again), peer_bytes(step))
            )
            print(f"{steps:>4} {share:>11.0%} {flops / 1e9:>7.2f} {their_flops / 1e9:>7.2f} "
                  f"{their_flops / flops:>6.2f} {kept / 1e3:>9,.0f} {kept_again / 1e3:>10,.0f} "
                  f"{theirs / 1e3:>7,.0f} {theirs / kept:>6.2f}")  # fmt: skip
            case = f"s{steps}_r{share * 100:.0f}"
            ratios[f"flops_{case}"] = their_flops / flops
            ratios[f"bytes_{case}"] = theirs / kept
    return ratios


def memory_table(config: Config, shares: tuple[float, ...]) -> dict[str, float]:
    """The plan at the length of the experiment, then the longest length by card."""
    for recompute in Recompute:
        chosen = with_recompute(config, recompute)
        print(f"\nrecompute {recompute}, half of the rows supervised")
        print("\n".join(plan(chosen, supervised_share=0.5, document_rows=DOCUMENT_ROWS).lines()))
    print(f"\nlongest max_seq_len\n{'recompute':<10} {'supervised':>11}"
          f"{''.join(f'{card:>9} GB' for card in CARDS_GB)}")  # fmt: skip
    ratios = {}
    for share in shares:
        longest = {
            recompute: [
                longest_max_seq_len(
                    with_recompute(config, recompute), card * GB, supervised_share=share
                )
                for card in CARDS_GB
            ]
            for recompute in Recompute
        }
        for recompute, rows in longest.items():
            print(f"{recompute:<10} {share:>11.0%}{''.join(f'{each:>12,}' for each in rows)}")
        at = CARDS_GB.index(96)
        ratios.setdefault(
            "rows_96gb_recompute_over_kept",
            longest[Recompute.mlp][at] / longest[Recompute.none][at],
        )
    return ratios


def with_recompute(config: Config, recompute: Recompute) -> Config:
    return replace(config, compute=replace(config.compute, recompute=recompute))


def finish(ratios: dict[str, float], args: argparse.Namespace) -> int:
    """Misses, and the JSON as the last line."""
    print(f"\neagle3 {__version__}, from formulas{', quick' if args.quick else ''}")
    missed = [k for k, least in AT_LEAST.items() if k in ratios and ratios[k] < least]
    for key in missed:
        print(f"outside the threshold: {key} = {ratios[key]:.4g}, at least {AT_LEAST[key]}")
    line = json.dumps({key: float(f"{value:.4g}") for key, value in ratios.items()})
    if args.out is not None:
        args.out.write_text(line + "\n")
    print(line)
    return int(args.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
