"""Packing of one epoch: fill, steps, rows kept, balance over ranks, and time.

    python benchmarks/packing.py [--quick] [--check] [--out FILE]

First, 37,312 and a million documents (log-normal lengths, sigma 0.8, 16 to 8192 tokens, mean 2353;
10 % to 90 % of each is an answer) in packs of 4,096 rows with ``split`` on 4 ranks: cutting,
packing and dealing, timed as CPU seconds of one thread, the best of three (the million once).

Then the recorded results of another trainer's sampler (speculators 0.9.0, from another machine:
tests/golden/sampler.json) beside ours on its lengths, with its ``max_len`` and replicas. It counts
tokens and cuts what is longer; we count rows, of which a document of n tokens has n - 1. Both lay
``max_len`` places a batch, so fill is what lies in them over places, and *kept* is what both train:
rows that belong to a document, each once. Our context and look-ahead rows fill places but are not
kept. All of its samples count as supervised, because it knows no masks.

``--quick`` leaves the million out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle3 import __version__
from eagle3.data.masks import Runs
from eagle3.data.packing import PackingRule, segment_documents
from eagle3.data.plan import EpochPlan, PackingReport, packing_report, training_plan
from eagle3.names import LongDocuments

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
SIZES = {"37k": 37_312, "1m": 1_000_000}
RANKS, MAX_SEQ_LEN, CONTEXT, TTT_STEPS = 4, 4096, 128, 3
MEAN_TOKENS, SIGMA, SHORTEST, LONGEST = 2353, 0.8, 16, 8192

AT_LEAST = {
    "fill_37k": 0.998,
    "fill_1m": 0.998,
    "kept_per_place_over_peer_truncate": 1.05,
    "kept_per_place_over_peer_split": 1.05,
}
"""The last two are the worst of the sampler's eight settings."""
AT_MOST = {
    "balance_rows_37k": 1.01,
    "balance_rows_1m": 1.01,
    "balance_supervised_37k": 1.01,
    "balance_supervised_1m": 1.01,
    "step_skew_37k": 1.06,
    "step_skew_1m": 1.06,
    "cpu_s_37k_over_half_second": 1.0,
    "cpu_s_1m_over_ten_seconds": 1.0,
    "steps_over_peer_truncate": 0.95,
}


@dataclass(frozen=True)
class Epoch:
    """One packed epoch."""

    plan: EpochPlan
    report: PackingReport
    kept_rows: int
    """Rows of documents that are trained, each once."""
    all_rows: int
    """Rows of all documents."""
    cpu_s: float

    @property
    def kept_per_place(self) -> float:
        """Rows kept over places of all batches."""
        return self.kept_rows / (self.report.packs * self.report.max_seq_len)


def main() -> int:
    args = arguments()
    ratios = scale(["37k"] if args.quick else list(SIZES))
    ratios |= beside_the_peer()
    return finish(ratios, args)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="leave out the million documents")
    parser.add_argument("--check", action="store_true", help="exit 1 outside the thresholds")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    return parser.parse_args()


def scale(names: list[str]) -> dict[str, float]:
    """Our figures at both sizes."""
    print(f"split, packs of {MAX_SEQ_LEN:,} rows, {RANKS} ranks, {CONTEXT} context rows")
    print(f"{'documents':>10} {'steps':>8} {'fill':>8} {'overhead':>9} {'kept':>7} "
          f"{'rows':>7} {'superv.':>8} {'step':>7} {'CPU s':>7}")  # fmt: skip
    ratios: dict[str, float] = {}
    for name in names:
        lengths, gates = captured(SIZES[name])
        runs = [
            pack(lengths, gates, LongDocuments.split, MAX_SEQ_LEN, RANKS)
            for _ in range(3 if name == "37k" else 1)
        ]
        report, cpu_s = runs[0].report, min(run.cpu_s for run in runs)
        print(f"{SIZES[name]:>10,} {report.steps:>8,} {report.fill:>8.2%} "
              f"{report.overhead_fraction:>9.2%} {runs[0].kept_rows / runs[0].all_rows:>7.1%} "
              f"{report.balance_rows:>7.4f} {report.balance_supervised:>8.4f} "
              f"{report.step_skew:>7.4f} {cpu_s:>7.2f}")  # fmt: skip
        ratios |= {
            f"fill_{name}": report.fill,
            f"balance_rows_{name}": report.balance_rows,
            f"balance_supervised_{name}": report.balance_supervised,
            f"step_skew_{name}": report.step_skew,
        }
        limit = ("half_second", 0.5) if name == "37k" else ("ten_seconds", 10)
        ratios[f"cpu_s_{name}_over_{limit[0]}"] = cpu_s / limit[1]
    print("kept: rows trained; the others lie in segments without an answer, all supervised rows "
          "are kept.\nrows, superv.: busiest rank over the mean of an epoch; step: the same for "
          "supervised rows of one step, averaged")  # fmt: skip
    return ratios


def captured(documents: int) -> tuple[NDArray[np.int64], Runs]:
    """Lengths [D] in tokens, and gates."""
    rng = np.random.default_rng(0)
    normal = rng.normal(size=documents)
    low, high = 1.0, 4.0 * MEAN_TOKENS
    while high - low > 1e-3:  # clipping moves the mean, so the median is searched
        median = (low + high) / 2
        drawn = np.clip(median * np.exp(SIGMA * normal), SHORTEST, LONGEST)
        low, high = (median, high) if drawn.mean() < MEAN_TOKENS else (low, median)
    lengths = drawn.astype(np.int64)
    prompts = (lengths * rng.uniform(0.1, 0.9, documents)).astype(np.int64)
    return lengths, Runs(np.arange(documents + 1), np.stack([prompts, lengths - 1], axis=1))


def pack(
    lengths: NDArray[np.int64],
    gates: Runs,
    long_documents: LongDocuments,
    max_seq_len: int,
    ranks: int,
) -> Epoch:
    """Epoch 0 of all documents."""
    rule = PackingRule(max_seq_len, long_documents, CONTEXT, TTT_STEPS)
    started = time.process_time()
    segmentation = segment_documents(np.arange(len(lengths)), lengths, gates, rule)
    plan = training_plan(segmentation.segments, max_seq_len, 0, 0, ranks, 1)
    cpu_s = time.process_time() - started
    kept = int(plan.packs.table.own_rows[plan.packs.order].sum())
    report = packing_report(segmentation, plan, max_seq_len, 0)
    return Epoch(plan, report, kept, int((lengths - 1).sum()), cpu_s)


def beside_the_peer() -> dict[str, float]:
    """Its recorded results and ours on its lengths; the worst ratios of all settings."""
    recorded = json.loads((GOLDEN / "sampler.json").read_text())["rows"]
    with np.load(GOLDEN / "sampler_lengths.npz") as file:
        arrays = {name: file[name].astype(np.int64) for name in file.files}
    print("\nbeside the recorded sampler: T = truncate as it does, S = split")
    print(f"{'samples':>8} {'len':>5} {'ranks':>5} {'fill':>23} {'steps of a rank':>23} "
          f"{'kept rows':>23} {'rows a step':>15}")  # fmt: skip
    print(f"{'':>20}" + f" {'peer':>7} {'T':>7} {'S':>7}" * 3 + f" {'peer':>7} {'T':>7}")
    ratios: dict[str, list[float]] = {}
    for peer in recorded:
        for name, ratio in compare(peer, arrays).items():
            ratios.setdefault(name, []).append(ratio)
    print("rows a step: busiest rank over the mean of a step, averaged, where its batches are kept")
    return {
        name: max(values) if name.startswith("steps") else min(values)
        for name, values in ratios.items()
    }


def compare(peer: dict[str, Any], arrays: dict[str, NDArray[np.int64]]) -> dict[str, float]:
    """One setting: prints a line."""
    lengths = arrays[f"lengths.{peer['samples']}"]
    max_len, ranks = peer["max_len"], peer["replicas"]
    gates = Runs(
        np.arange(len(lengths) + 1), np.stack([np.zeros_like(lengths), lengths - 1], axis=1)
    )
    cut = pack(lengths, gates, LongDocuments.truncate, max_len, ranks)
    split = pack(lengths, gates, LongDocuments.split, max_len, ranks)
    places = peer["batches_total"] * max_len
    # Each laid sample loses one row to the shift; dropped samples are not laid.
    peer_kept = peer["fill_efficiency"] * places - (len(lengths) - peer["samples_dropped"])
    peer_steps = peer["batches_per_rank"][0]
    cells = [
        [f"{fill:.1%}" for fill in (peer["fill_efficiency"], cut.report.fill, split.report.fill)],
        [f"{steps:,}" for steps in (peer_steps, cut.report.steps, split.report.steps)],
        [f"{k / cut.all_rows:.1%}" for k in (peer_kept, cut.kept_rows, split.kept_rows)],
        [peer_step_skew(peer, lengths, arrays), f"{step_skew(cut.plan):.3f}" if ranks > 1 else ""],
    ]
    print(f"{peer['samples']:>8,} {max_len:>5} {ranks:>5} "
          + " ".join(f"{cell:>7}" for group in cells for cell in group))  # fmt: skip
    return {
        "steps_over_peer_truncate": cut.report.steps / peer_steps,
        "kept_per_place_over_peer_truncate": cut.kept_per_place / (peer_kept / places),
        "kept_per_place_over_peer_split": split.kept_per_place / (peer_kept / places),
    }


def peer_step_skew(
    peer: dict[str, Any], lengths: NDArray[np.int64], arrays: dict[str, NDArray[np.int64]]
) -> str:
    """From the recorded batches, of 500 samples on 4 replicas only."""
    if (peer["samples"], peer["replicas"]) != (500, RANKS):
        return ""
    tokens = []
    for rank in range(RANKS):
        prefix = f"batches.{peer['max_len']}.rank{rank}"
        laid = np.minimum(lengths[arrays[f"{prefix}.index"]], peer["max_len"])
        starts = np.cumsum(arrays[f"{prefix}.size"]) - arrays[f"{prefix}.size"]
        tokens.append(np.add.reduceat(laid, starts))
    by_step = np.stack(tokens)
    return f"{(by_step.max(axis=0) / by_step.mean(axis=0)).mean():.3f}"


def step_skew(plan: EpochPlan) -> float:
    """Rows of the busiest rank over the mean, averaged over steps."""
    rows = plan.rank_sums(plan.packs.rows)
    return float((rows.max(axis=1) / rows.mean(axis=1)).mean())


def finish(ratios: dict[str, float], args: argparse.Namespace) -> int:
    """Hardware, misses, and the JSON as the last line."""
    print(f"\neagle3 {__version__}, numpy {np.__version__}, Python {platform.python_version()}, "
          f"{processor()}, {os.cpu_count()} cores, one thread"
          f"{', quick' if args.quick else ''}")  # fmt: skip
    missed = [k for k, least in AT_LEAST.items() if k in ratios and ratios[k] < least]
    missed += [k for k, most in AT_MOST.items() if k in ratios and ratios[k] > most]
    for key in missed:
        limit = f"at least {AT_LEAST[key]}" if key in AT_LEAST else f"at most {AT_MOST[key]}"
        print(f"outside the threshold: {key} = {ratios[key]:.4f}, {limit}")
    line = json.dumps({key: round(value, 4) for key, value in ratios.items()})
    if args.out is not None:
        args.out.write_text(line + "\n")
    print(line)
    return int(args.check and bool(missed))


def processor() -> str:
    """The CPU's name, as Linux tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    sys.exit(main())
