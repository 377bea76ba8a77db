"""Checkpoints: bytes of the drafter for Kimi-K2.5, seconds of a save, and its share of a run.

    python benchmarks/checkpoint.py [--quick] [--check] [--out FILE] [--dir DIR] [--rounds 3]

The size at full width is computed, as preflight does. It is held against files on the disk: the
drafter of ``conf/model/kimi_k25.yaml`` with its widths, heads and vocabularies divided by 8, 4 and
2, with AdamW's states, written by the writer that training uses (a temporary file, fsync, rename,
fsync of the directory). Beside each save, in turn, the same bytes are written and synced in blocks
of 16 MiB, which is what the disk itself takes. Training waits for a save, so all of it counts.

The seconds at full width are the bytes over the rate of the slowest save of the largest size. Their
share is taken of the pause between saves by time, ``trainer.checkpoint_every_minutes`` or what a
slow disk makes of it, and the gate of 2 % is for that; saves at epoch ends and of the best come on
top and are shown for an epoch whose length is a forecast, not a measurement. No card is used.

``--quick`` measures the smallest size only. ``--dir`` names the disk (the current directory).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from hydra import compose, initialize_config_dir
from measuring import status_bytes
from real_size import kimi_sizes
from step_case import build_case

from eagle3 import __version__
from eagle3.callbacks import AtomicCheckpointIO
from eagle3.compose import conf_dir, register_schema, to_config
from eagle3.config import Config, OptimConfig
from eagle3.names import CardName
from eagle3.optim import build_optimizer
from eagle3.planning.saving import pause_s
from eagle3.preflighting.forecast import MFU, checkpoint_bytes, planned_rate
from eagle3.preflighting.machine import CARDS

DIVISORS = (8, 4, 2)
BLOCK = 16 * 2**20
EPOCH_TOKENS = 87_800_000
"""Of the 37,312 samples that experiment=kimi_100k is made for."""
AT_MOST = {"interval_share": 0.02, "size_off": 0.01}


@dataclass(frozen=True)
class Saved:
    """Saves of one size."""

    divisor: int
    computed_bytes: int
    file_bytes: int
    seconds: tuple[float, ...]
    bare_seconds: tuple[float, ...]

    @property
    def worst_rate(self) -> float:
        """Bytes a second of the slowest save."""
        return self.file_bytes / max(self.seconds)

    @property
    def over_bare(self) -> float:
        return median(self.seconds) / median(self.bare_seconds)


def main() -> int:
    args = arguments()
    print(f"eagle3 {__version__}, torch {torch.__version__}, {platform.machine()} CPU, "
          f"load {os.getloadavg()[0]:.1f}, disk of {args.dir.resolve()}")  # fmt: skip
    print(f"{'width / ':>8} {'computed':>10} {'file':>10} {'save s':>16} {'bare write s':>16} "
          f"{'MB/s':>6} {'over bare':>9}")  # fmt: skip
    sizes = []
    with tempfile.TemporaryDirectory(prefix="checkpoint_", dir=args.dir) as folder:
        for divisor in DIVISORS[:1] if args.quick else DIVISORS:
            sizes.append(save_often(divisor, Path(folder), args.rounds))
            print(line_of(sizes[-1]), flush=True)
    figures = at_full_width(sizes)
    return finish(figures, args)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="an eighth of the width only")
    parser.add_argument("--check", action="store_true", help="exit 1 outside the thresholds")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    parser.add_argument("--dir", type=Path, default=Path(), help="folder on the disk to measure")
    parser.add_argument("--rounds", type=int, default=3, help="saves of each size")
    return parser.parse_args()


def save_often(divisor: int, folder: Path, rounds: int) -> Saved:
    """One save to warm up, then saves and bare writes by turns; each replaces the one before."""
    model = kimi_sizes(rows=16, divisor=divisor)
    drafter, _, _ = build_case(model, seed=0)
    optimizer = build_optimizer(drafter, OptimConfig(), 1e-5)
    for parameter in drafter.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    content = {"state_dict": drafter.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    writer, path = AtomicCheckpointIO(), folder / "step.ckpt"
    seconds, bare = [], []
    for _ in range(1 + rounds):
        started = time.perf_counter()
        writer.save_checkpoint(content, path)
        seconds.append(time.perf_counter() - started)
        if writer.failure is not None:
            raise writer.failure
        bare.append(write_bare(folder / "bare", path.stat().st_size))
    computed = checkpoint_bytes(Config(model=model.model))
    return Saved(divisor, computed, path.stat().st_size, tuple(seconds[1:]), tuple(bare[1:]))


def write_bare(path: Path, num_bytes: int) -> float:
    """Seconds to write and sync as many bytes, over the file that the last call has left."""
    block = os.urandom(BLOCK)
    started = time.perf_counter()
    with path.open("wb") as file:
        for start in range(0, num_bytes, BLOCK):
            file.write(block[: num_bytes - start])
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - started


def line_of(saved: Saved) -> str:
    times = [" ".join(f"{s:.2f}" for s in t) for t in (saved.seconds, saved.bare_seconds)]
    sizes = [f"{num_bytes / 1e9:.3f} GB" for num_bytes in (saved.computed_bytes, saved.file_bytes)]
    return (
        f"{saved.divisor:>8} {sizes[0]:>10} {sizes[1]:>10} {times[0]:>16} {times[1]:>16} "
        f"{saved.worst_rate / 1e6:>6.0f} {saved.over_bare:>9.2f}"
    )


def at_full_width(sizes: list[Saved]) -> dict[str, float]:
    """What the measured rates mean for the real drafter; prints it."""
    config = kimi_config()
    full, largest = checkpoint_bytes(config), sizes[-1]
    seconds = full / largest.worst_rate
    minutes = config.trainer.checkpoint_every_minutes
    assert minutes is not None
    rate = planned_rate(config, None, CARDS[CardName.h100])
    assert rate is not None
    epoch_s = EPOCH_TOKENS / rate
    pause = pause_s(60 * minutes, seconds)
    saves = int(epoch_s // (pause + seconds)) + 2
    figures = {
        "full_GB": full / 1e9,
        "full_save_s": seconds,
        "pause_min": pause / 60,
        "interval_share": seconds / (pause + seconds),
        "epoch_share": saves * seconds / (epoch_s + saves * seconds),
        "MB_per_s": largest.worst_rate / 1e6,
        "over_bare": largest.over_bare,
        "size_off": max(abs(s.file_bytes / s.computed_bytes - 1) for s in sizes),
        "peak_GiB": status_bytes("VmHWM") / 2**30,
    }
    print(f"\nfull width: {full / 1e9:.2f} GB computed, {seconds:.1f} s at the slowest save of the "
          f"largest size;\none, and {pause / 60:.1f} min until the next, takes "
          f"{figures['interval_share']:.2%}")  # fmt: skip
    print(f"an epoch of {EPOCH_TOKENS / 1e6:.1f} M tokens, forecast for four H100 at {MFU:.0%} of "
          f"their stated speed:\n{epoch_s / 60:.1f} min of training and {saves} saves (epoch end, "
          f"best, by time) take {figures['epoch_share']:.2%} on such a disk")  # fmt: skip
    return figures


def kimi_config() -> Config:
    """``experiment=kimi_100k``, planned for cards that need not be here."""
    register_schema()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(compose("train", ["experiment=kimi_100k", "card=h100"]))


def finish(figures: dict[str, float], args: argparse.Namespace) -> int:
    """Misses, and the JSON as the last line."""
    missed = [name for name, most in AT_MOST.items() if figures[name] > most]
    for name in missed:
        print(f"outside the threshold: {name} = {figures[name]:.4f}, at most {AT_MOST[name]}")
    line = json.dumps({name: round(value, 4) for name, value in figures.items()})
    if args.out is not None:
        args.out.write_text(line + "\n")
    print(line)
    return int(args.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
