"""One forward and backward of the drafter for Kimi-K2.5 at its real size, on a CPU.

    python benchmarks/real_size.py [--quick] [--check] [--out FILE] [--rows 256] [--ttt-steps 3]

Weights of ``conf/model/kimi_k25.yaml``, random, in bfloat16 for this one purpose (training keeps
float32): 1.19 G trainable parameters, the frozen embedding of 163,840 tokens and the verifier's
head on 32,000. One pack of 3 documents, 40 % prompt. Prints what each part of the memory holds, the
time, and whether every parameter got a finite gradient. Needs 15 GB.

``--quick`` takes an eighth of the width and of both vocabularies.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from measuring import reset_peak, status_bytes
from omegaconf import OmegaConf
from step_case import StepSizes, build_case
from torch import Tensor

from eagle3 import __version__
from eagle3.config import ComputeConfig
from eagle3.model.drafter import Drafter
from eagle3.objective import row_counts, run_pack, step_weights

ROOT = Path(__file__).parents[1]
AT_MOST = {"peak_GiB": 24.0, "without_gradient": 0, "not_finite": 0}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="an eighth of the width")
    parser.add_argument("--check", action="store_true", help="exit 1 outside the thresholds")
    parser.add_argument("--out", type=Path, help="file for the table and the figures")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--ttt-steps", type=int, default=3)
    return parser.parse_args()


def main() -> int:
    args = arguments()
    sizes = kimi_sizes(args.rows, 8 if args.quick else 1)
    started = time.perf_counter()
    drafter, head, batch = build_case(sizes, seed=0, dtype=torch.bfloat16)
    built_s = time.perf_counter() - started
    trainable = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    lines = [
        f"eagle3 {__version__}, torch {torch.__version__}, {platform.machine()} CPU, "
        f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}",
        f"trainable {trainable:,} parameters {_gib(drafter.parameters())}, "
        f"embedding {_gib([drafter.embed_tokens])}, verifier head {_gib([head.weight])}; "
        f"made in {built_s:.0f} s",
    ]
    resident = reset_peak()
    counts = row_counts([batch], args.ttt_steps)
    started = time.perf_counter()
    result = run_pack(
        drafter,
        head,
        batch,
        batch.aux_hidden,
        ttt_steps=args.ttt_steps,
        mix=[("kl", 1.0)],
        compute=ComputeConfig(),
        weights=step_weights(counts, step_loss_decay=1.0, world_size=1),
    )
    forward_s = time.perf_counter() - started
    result.loss.backward()
    total_s = time.perf_counter() - started
    peak = status_bytes("VmHWM")
    losses = [float(step.losses.mean()) for step in result.steps]
    lines += [
        f"{len(batch)} rows in {len(batch.document_lengths)} documents, rows with a loss at each "
        f"step {counts.tolist()}",
        f"mean loss at each step {', '.join(f'{loss:.3f}' for loss in losses)}",
        f"forward with loss {forward_s:.1f} s, backward {total_s - forward_s:.1f} s; peak "
        f"{peak / 2**30:.2f} GiB, {(peak - resident) / 2**30:.2f} over weights and batch",
    ]
    figures = {"peak_GiB": peak / 2**30, "seconds": total_s, "trainable": trainable}
    return finish(lines, figures | gradients(drafter, losses), args)


def kimi_sizes(rows: int, divisor: int) -> StepSizes:
    """The shapes of ``conf/model/kimi_k25.yaml``, widths divided."""
    model = OmegaConf.load(ROOT / "conf" / "model" / "kimi_k25.yaml")
    return replace(
        StepSizes(),
        hidden_size=model.hidden_size // divisor,
        intermediate_size=model.intermediate_size // divisor,
        heads=model.num_attention_heads // divisor,
        kv_heads=model.num_key_value_heads // divisor,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size // divisor,
        draft_vocab_size=model.draft_vocab_size // divisor,
        rows=rows,
        documents=3,
        masked=0.4,
        lm_head_trainable=True,
    )


def gradients(drafter: Drafter, losses: list[float]) -> dict[str, float]:
    """Parameters that got none, and those with NaN or inf (a loss that is not finite counts)."""
    found = [p.grad for p in drafter.parameters() if p.requires_grad]
    bad = sum(grad is not None and not bool(torch.isfinite(grad).all()) for grad in found)
    return {
        "without_gradient": sum(grad is None or not bool(grad.any()) for grad in found),
        "not_finite": bad + sum(not math.isfinite(loss) for loss in losses),
    }


def _gib(tensors: object) -> str:
    parts: list[Tensor] = list(tensors)  # type: ignore[call-overload]
    return f"{sum(t.nbytes for t in parts) / 2**30:.2f} GiB"


def finish(lines: list[str], figures: dict[str, float], args: argparse.Namespace) -> int:
    """Print the table, the verdict, and the figures as JSON."""
    missed = [name for name, most in AT_MOST.items() if figures[name] > most]
    bounds = ", ".join(f"{name} <= {most}" for name, most in AT_MOST.items())
    lines.append(f"thresholds: {bounds}: missed {', '.join(missed) or 'none'}")
    lines.append(json.dumps({name: round(value, 3) for name, value in figures.items()}))
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")
    return int(args.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
