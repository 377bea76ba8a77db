"""One training step with its techniques off, each one alone, and all.

    python benchmarks/step.py [--quick] [--check] [--out FILE] [--figure PNG] [--rounds N]
                              [--device cpu|cuda]

Forward and backward of one pack: hidden 512, 8 heads of 64, 8,192 draft tokens, 2,048 rows in 6
documents of which the first half is prompt, 3 and 7 TTT steps. All ways compute the same loss and
gradients; the first column is what ``compute=reference`` changes to. In turns, in one process;
medians of CPU seconds, and the peak of memory over the inputs.

With ``--device cuda`` the sizes are those of a drafter for Kimi-K2.5 under bfloat16 autocast, and
the time is that of the device. There, and with ``--quick`` (half the rows, where the quadratic mask
of the reference weighs less), only the loss is held against its threshold.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from matplotlib.figure import Figure
from step_case import Measurement, StepSizes, build_case, measure

from eagle3 import __version__
from eagle3.config import ComputeConfig
from eagle3.names import AttentionImpl, ComputedRows, EmbeddingHalf, LossImpl, Recompute
from eagle3.objective import row_counts, run_pack, step_weights

PLAIN = ComputeConfig.reference()
WAYS = {
    "reference": PLAIN,
    "rows=read": replace(PLAIN, rows=ComputedRows.read),
    "embedding_half=once": replace(PLAIN, embedding_half=EmbeddingHalf.once),
    "attention=merged": replace(PLAIN, attention=AttentionImpl.merged),
    "loss=deferred": replace(PLAIN, loss=LossImpl.deferred),
    "recompute=mlp": replace(PLAIN, recompute=Recompute.mlp),
    "all": ComputeConfig(),
    "all, recompute=mlp": ComputeConfig(recompute=Recompute.mlp),
}
TTT_STEPS = (3, 7)
AT_MOST = {
    "S3_all_time": 0.40,
    "S3_all_memory": 0.40,
    "S7_all_time": 0.28,
    "S7_all_memory": 0.28,
    "loss_difference": 1e-5,
}
"""Times and memory: shares of the reference."""
SIZES = StepSizes()
QUICK = replace(SIZES, rows=1024)
QUICK_WAYS = ("reference", "all")
KIMI = replace(
    SIZES,
    hidden_size=7168,
    intermediate_size=18432,
    heads=64,
    kv_heads=64,
    head_dim=128,
    vocab_size=163840,
    draft_vocab_size=32000,
)


@dataclass(frozen=True)
class Cost:
    """Of one way at one number of TTT steps, medians."""

    seconds: float
    peak_bytes: float
    loss: float


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="half the rows, all or nothing")
    parser.add_argument("--check", action="store_true", help="exit 1 outside the thresholds")
    parser.add_argument("--out", type=Path, help="file for the table and the ratios")
    parser.add_argument("--figure", type=Path, help="PNG file for the table as bars")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, help="default 3 (quick: 1)")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    on_cuda = args.device == "cuda"
    if on_cuda and not torch.cuda.is_available():
        print("error: --device cuda, but PyTorch finds no CUDA device here", file=sys.stderr)
        return 2
    sizes = KIMI if on_cuda else QUICK if args.quick else SIZES
    costs: dict[int, dict[str, Cost]] = {}
    for ttt_steps in TTT_STEPS:
        ways = QUICK_WAYS if args.quick else tuple(WAYS)
        bench = Bench(sizes, ttt_steps, args.device, ways)
        costs[ttt_steps] = bench.run(args.rounds or (1 if args.quick else 3))
    lines = [head(sizes, args.device)]
    for ttt_steps, ways in costs.items():
        lines += table(ttt_steps, ways)
    if args.figure:
        draw(costs, lines[0], args.figure)
    return finish(lines, ratios(costs), args)


class Bench:
    """One pack, and every way to train it."""

    def __init__(
        self, sizes: StepSizes, ttt_steps: int, device: str, ways: tuple[str, ...]
    ) -> None:
        drafter, head, batch = build_case(sizes, seed=0)
        self.drafter, self.head = drafter.to(device), head.to(device)
        self.batch, self.ttt_steps, self.device = batch.to(device), ttt_steps, device
        counts = row_counts([self.batch], ttt_steps).to(device)
        self.weights = step_weights(counts, step_loss_decay=1.0, world_size=1)
        self.ways, self.losses = ways, dict.fromkeys(ways, 0.0)

    def run(self, rounds: int) -> dict[str, Cost]:
        """In turns; before each measurement one step to warm up."""
        found: dict[str, list[Measurement]] = {name: [] for name in self.ways}
        measured = measure if self.device == "cpu" else measure_cuda
        for number in range(rounds):
            for name in self.ways:
                found[name].append(measured(lambda name=name: self.step(name), 1))
                last = found[name][-1]
                print(
                    f"S={self.ttt_steps} round {number + 1} of {rounds}: {name} {last.cpu_s:.2f} s",
                    file=sys.stderr,
                )
        return {
            name: Cost(
                median(m.cpu_s for m in runs), median(m.peak_bytes for m in runs), self.losses[name]
            )
            for name, runs in found.items()
        }

    def step(self, name: str) -> None:
        """Forward and backward; gradients are a part of its peak, and gone before the next one."""
        mixed = torch.autocast("cuda", torch.bfloat16) if self.device == "cuda" else nullcontext()
        with mixed:
            result = run_pack(
                self.drafter,
                self.head,
                self.batch,
                self.batch.aux_hidden,
                ttt_steps=self.ttt_steps,
                mix=[("kl", 1.0)],
                compute=WAYS[name],
                weights=self.weights,
            )
        result.loss.backward()
        self.losses[name] = float(result.loss.detach())
        self.drafter.zero_grad(set_to_none=True)


def measure_cuda(run: Callable[[], None], repeats: int) -> Measurement:
    """As :func:`measure`, of the device: seconds between synchronisations, peak of allocations."""
    run()
    seconds, peaks = [], []
    for _ in range(repeats):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    return Measurement(median(seconds), max(peaks))


def ratios(costs: dict[int, dict[str, Cost]]) -> dict[str, float]:
    """Of the reference, by name."""
    found: dict[str, float] = {}
    worst = 0.0
    for ttt_steps, ways in costs.items():
        plain = ways["reference"]
        for name, cost in ways.items():
            key = f"S{ttt_steps}_{name.replace(', ', '_')}"
            found[f"{key}_time"] = cost.seconds / plain.seconds
            found[f"{key}_memory"] = cost.peak_bytes / plain.peak_bytes
            worst = max(worst, abs(cost.loss - plain.loss) / abs(plain.loss))
    return found | {"loss_difference": worst}


def head(sizes: StepSizes, device: str) -> str:
    where = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU"
    return (
        f"eagle3 {__version__}, torch {torch.__version__}, {where}, {torch.get_num_threads()} "
        f"threads, load {os.getloadavg()[0]:.1f}; {sizes.rows} rows, {sizes.documents} documents, "
        f"{sizes.masked:.0%} masked, hidden {sizes.hidden_size}, {sizes.draft_vocab_size} tokens"
    )


def table(ttt_steps: int, ways: dict[str, Cost]) -> list[str]:
    plain = ways["reference"]
    lines = [f"S = {ttt_steps:<22} {'seconds':>9} {'time':>7} {'MB':>8} {'memory':>7}"]
    for name, cost in ways.items():
        lines.append(
            f"{name:<26} {cost.seconds:9.2f} {cost.seconds / plain.seconds:7.2f} "
            f"{cost.peak_bytes / 1e6:8.0f} {cost.peak_bytes / plain.peak_bytes:7.2f}"
        )
    return lines


def draw(costs: dict[int, dict[str, Cost]], title: str, path: Path) -> None:
    """Share of the reference's time and memory, a panel for each number of TTT steps."""
    figure = Figure(figsize=(10, 0.45 * len(WAYS) + 1.6), layout="constrained")
    panels = figure.subplots(1, len(costs), sharey=True)
    for panel, (ttt_steps, ways) in zip(panels, costs.items(), strict=True):
        plain, places = ways["reference"], range(len(ways))
        times = [cost.seconds / plain.seconds for cost in ways.values()]
        memories = [cost.peak_bytes / plain.peak_bytes for cost in ways.values()]
        for offset, label, values in ((-0.2, "time", times), (0.2, "memory", memories)):
            bars = panel.barh([place + offset for place in places], values, 0.38, label=label)
            panel.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
        panel.set_yticks(places, list(ways))
        panel.set_title(f"{ttt_steps} TTT steps", fontsize=10)
        panel.set_xlabel("share of the reference")
        panel.set_xlim(0, 1.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    panels[-1].legend(loc="lower right", frameon=False)
    figure.suptitle("\n".join(title.split("; ")), fontsize=9)
    figure.savefig(path, dpi=130)


def finish(lines: list[str], found: dict[str, float], args: argparse.Namespace) -> int:
    """Print the table, the verdict, and the ratios as JSON."""
    partly = args.quick or args.device == "cuda"
    checked = {name: AT_MOST[name] for name in (("loss_difference",) if partly else AT_MOST)}
    missed = [name for name, most in checked.items() if found[name] > most]
    bounds = ", ".join(f"{name} <= {most}" for name, most in checked.items())
    lines.append(f"thresholds: {bounds}: missed {', '.join(missed) or 'none'}")
    lines.append(json.dumps({name: float(f"{ratio:.3g}") for name, ratio in found.items()}))
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")
    return int(args.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
