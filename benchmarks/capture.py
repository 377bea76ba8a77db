"""Capture against a plain forward loop: tokens per CPU second, on the demo verifier.

    python benchmarks/capture.py [--quick] [--check] [--out FILE] [--cache DIR] [--rounds 3]

Both load the model and run it over the same documents in the same batches, float32 on CPU, by turns
in one process. The loop is what transformers gives: padded batches through the decoder, nothing
kept. The capture is the whole of ``python -m eagle3.capture``: states of three aux layers and the
last are checked to be finite, rounded to bfloat16 and written with checksums, journal and index.
CPU seconds are those of all threads, loading included; the ratio is of the medians. The disk's time
is not in it, wall seconds stand beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import transformers

from eagle3 import __version__
from eagle3.capturing.batches import plan_batches
from eagle3.capturing.config import CaptureRunConfig
from eagle3.capturing.documents import Document
from eagle3.capturing.plan import CapturePlan, plan_capture
from eagle3.capturing.running import capture
from eagle3.tokens import asset_path
from eagle3.verifier.smollm2 import ensure_smollm2

AT_LEAST = 0.9
"""Tokens per CPU second over those of the loop."""
DOCUMENTS, QUICK_DOCUMENTS, WARM_UP_DOCUMENTS = 160, 24, 4


@dataclass(frozen=True)
class Spent:
    cpu_s: float
    wall_s: float


def main() -> int:
    args = arguments()
    print(f"eagle3 {__version__}, torch {torch.__version__}, transformers "
          f"{transformers.__version__}, {torch.get_num_threads()} threads, "
          f"{platform.machine()} CPU, load {os.getloadavg()[0]:.1f}")  # fmt: skip
    verifier = ensure_smollm2(args.cache)
    documents = QUICK_DOCUMENTS if args.quick else DOCUMENTS
    loops, captures = [], []
    with tempfile.TemporaryDirectory() as folder:  # imports and first calls, not measured
        for run in (loop, capture_quietly):
            run(planned(verifier, Path(folder), WARM_UP_DOCUMENTS))
    for number in range(args.rounds):
        with tempfile.TemporaryDirectory(prefix="capture_", dir=args.cache) as folder:
            plan = planned(verifier, Path(folder) / "states", documents)
            tokens = sum(len(ids) for ids in token_ids(plan))
            sides = [(loops, loop), (captures, capture_quietly)]
            for found, run in sides if number % 2 == 0 else sides[::-1]:
                found.append(spent_on(run, plan))
        print(f"round {number + 1}: {line_of(loops[-1])} loop, {line_of(captures[-1])} capture",
              flush=True)  # fmt: skip
    return finish(figures_of(tokens, documents, loops, captures), args)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_DOCUMENTS} documents only")
    parser.add_argument("--check", action="store_true", help="exit 1 below the threshold")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    parser.add_argument("--cache", type=Path, default=Path(".cache/eagle3"), help="paths.cache")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each")
    return parser.parse_args()


def planned(verifier: Path, out: Path, documents: int) -> CapturePlan:
    return plan_capture(
        CaptureRunConfig(
            verifier=str(verifier),
            tokens=str(asset_path()),
            out=str(out),
            num_samples=documents,
            device="cpu",
        )
    )


def token_ids(plan: CapturePlan) -> list[tuple[int, ...]]:
    return [item.ids for item in plan.items if isinstance(item, Document)]


@torch.inference_mode()
def loop(plan: CapturePlan) -> None:
    """The decoder over padded batches; what it returns is dropped."""
    ids = token_ids(plan)
    model = transformers.AutoModel.from_pretrained(
        plan.verifier_dir, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    ).eval()
    for batch in plan_batches([len(one) for one in ids], plan.batch_tokens):
        tensors = [torch.tensor(ids[place]) for place in batch]
        padded = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)
        model(padded, use_cache=False)


def capture_quietly(plan: CapturePlan) -> None:
    outcome = capture(plan, lambda line: None)
    assert outcome.documents == len(plan.items), outcome.failed


def spent_on(run: Callable[[CapturePlan], None], plan: CapturePlan) -> Spent:
    wall, cpu = time.perf_counter(), time.process_time()
    run(plan)
    return Spent(time.process_time() - cpu, time.perf_counter() - wall)


def line_of(spent: Spent) -> str:
    return f"{spent.cpu_s:.1f} CPU s ({spent.wall_s:.1f} s)"


def figures_of(
    tokens: int, documents: int, loops: Sequence[Spent], captures: Sequence[Spent]
) -> dict[str, float]:
    loop_s, capture_s = (median(s.cpu_s for s in side) for side in (loops, captures))
    figures = {
        "documents": documents,
        "tokens": tokens,
        "loop_tokens_per_cpu_s": tokens / loop_s,
        "capture_tokens_per_cpu_s": tokens / capture_s,
        "ratio": loop_s / capture_s,
        "wall_ratio": median(s.wall_s for s in loops) / median(s.wall_s for s in captures),
    }
    print(f"{documents} documents, {tokens:,} tokens: loop {tokens / loop_s:.0f} tokens per CPU "
          f"second, capture {tokens / capture_s:.0f}, ratio {figures['ratio']:.3f} "
          f"(wall {figures['wall_ratio']:.3f})")  # fmt: skip
    return figures


def finish(figures: dict[str, float], args: argparse.Namespace) -> int:
    """A miss, and the JSON as the last line."""
    missed = figures["ratio"] < AT_LEAST
    if missed:
        print(f"outside the threshold: ratio = {figures['ratio']:.3f}, at least {AT_LEAST}")
    line = json.dumps({name: round(value, 4) for name, value in figures.items()})
    if args.out is not None:
        args.out.write_text(line + "\n")
    print(line)
    return int(args.check and missed)


if __name__ == "__main__":
    sys.exit(main())
