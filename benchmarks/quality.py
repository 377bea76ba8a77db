"""Quality against a recorded run of another EAGLE-3 trainer, at equal epochs and equal CPU time.

    python benchmarks/quality.py [--quick] [--check] [--out FILE]

212 greedy answers of SmolLM2-135M-Instruct, the last 11 for validation. Settings of the recorded
run: packs of 512, three TTT steps, forward KL, noise 0.05, AdamW with weight decay 0.01, lr 1e-3,
cosine over six epochs, 1 % warmup, clip 1.0, draft head frozen, one thread, float32. Its figures
(speculators 0.9.0, one seed) come from another machine of the same kind and are constants below.
Its accuracy looks at the draft vocabulary only; ours counts a token outside of it as wrong.
``--quick`` takes a few answers and one epoch: it shows that the benchmark runs, not quality.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle3 import __version__
from eagle3.data.vocab import VocabMap
from eagle3.data.vocab_files import save_vocab_map
from eagle3.prefill import capture_sequences
from eagle3.run_folder import read_metrics
from eagle3.tokens import read_token_file
from eagle3.verifier.smollm2 import ensure_smollm2

TOKENS = Path(__file__).parents[1] / "tests" / "assets" / "smollm2_baseline_212.jsonl.gz"
VALIDATION_SAMPLES = 11
QUICK_SAMPLES = (12, 3)
DRAFT_VOCAB, VERIFIER_VOCAB = 8192, 49152


@dataclass(frozen=True)
class Epoch:
    """One validation."""

    loss: float
    """Summed over three steps."""
    full_acc: tuple[float, float, float]
    pooled: float
    replay: float | None = None


PEER_CPU_S_PER_EPOCH = 103.0
PEER = (
    Epoch(15.897, (0.1828, 0.0235, 0.0027), 1.209),
    Epoch(13.287, (0.2130, 0.0302, 0.0020), 1.245),
    Epoch(11.834, (0.2722, 0.0598, 0.0108), 1.343),
    Epoch(10.824, (0.2964, 0.0672, 0.0168), 1.380),
    Epoch(10.477, (0.3192, 0.0820, 0.0195), 1.421),
    Epoch(10.371, (0.3192, 0.0813, 0.0175), 1.418),
)
THRESHOLDS = {
    "accuracy_equal_epochs": 1.0,
    "accepted_equal_epochs": 1.0,
    "accuracy_equal_cpu": 1.0,
    "accepted_equal_cpu": 1.0,
    "speed_equal_epochs": 1.0,
}
"""Ours over the recorded run's, at least: step-0 accuracy, accepted drafts a pass, 1 / CPU time."""


def main() -> int:
    args = arguments()
    epochs = 1 if args.quick else len(PEER)
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        overrides = prepare(work, Path(args.cache), quick=args.quick)
        equal, cpu_s = train(work, overrides, epochs)
        print_epochs(f"equal epochs: {cpu_s:.0f} CPU s", equal)
        ratios = compare(equal[-1], PEER[epochs - 1], "equal_epochs")
        ratios["speed_equal_epochs"] = PEER_CPU_S_PER_EPOCH * epochs / cpu_s
        if not args.quick:
            more = max(epochs, round(epochs * ratios["speed_equal_epochs"]))
            longer, cpu_s = train(work, overrides, more)
            print_epochs(f"equal CPU time: {more} epochs in {cpu_s:.0f} CPU s", longer)
            ratios |= compare(longer[-1], PEER[-1], "equal_cpu")
    return finish(ratios, args)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a minute: shows that it runs")
    parser.add_argument("--check", action="store_true", help="exit 1 below the thresholds")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    parser.add_argument("--cache", default=".cache/eagle3", help="keeps the converted verifier")
    return parser.parse_args()


def prepare(work: Path, cache: Path, *, quick: bool) -> list[str]:
    """Capture both splits and build the vocabulary map; returns the run's overrides."""
    verifier = ensure_smollm2(cache)
    samples = read_token_file(TOKENS)
    splits = {"train": samples[:-VALIDATION_SAMPLES], "val": samples[-VALIDATION_SAMPLES:]}
    if quick:
        sizes = dict(zip(splits, QUICK_SAMPLES, strict=True))
        splits = {name: part[: sizes[name]] for name, part in splits.items()}
    for name, part in splits.items():
        capture_sequences(verifier, part, work / name, aux_layer_ids=[3, 16, 28])
    answers = [torch.tensor(s.ids[s.prompt_length :]) for s in splits["train"]]
    counts = torch.bincount(torch.cat(answers), minlength=VERIFIER_VOCAB)
    vocab = VocabMap.from_frequencies(counts, DRAFT_VOCAB, VERIFIER_VOCAB)
    save_vocab_map(work / "vocab.safetensors", vocab)
    return [
        "name=quality",
        "model=smollm2",
        "model.lm_head_trainable=false",
        f"paths.verifier={verifier.resolve()}",
        f"paths.shards={work / 'train'}",
        f"paths.val_shards={work / 'val'}",
        f"paths.vocab_map={work / 'vocab.safetensors'}",
        f"paths.cache={work / 'cache'}",
        "lr=1e-3",
        "max_seq_len=512",
        "ttt_steps=3",
        "noise_std=0.05",
        "optim.warmup_ratio=0.01",
        "trainer.accelerator=cpu",
        "trainer.precision=float32",
        "data.num_workers=1",
        "logger.wandb=disabled",
    ]


def train(work: Path, overrides: list[str], epochs: int) -> tuple[list[Epoch], float]:
    """A run in its own process on one thread; its validations, and all its CPU seconds."""
    output = work / f"runs_{epochs}"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "eagle3.train", *overrides, f"epochs={epochs}",
         f"paths.output={output}"],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    (folder,) = output.iterdir()
    rows = [row for row in read_metrics(folder) if "val/loss" in row]
    validations = [
        Epoch(
            loss=3 * row["val/loss"],
            full_acc=(row["val/full_acc/0"], row["val/full_acc/1"], row["val/full_acc/2"]),
            pooled=row["val/acceptance_pooled"],
            replay=row["val/acceptance_replay"],
        )
        for row in rows
    ]
    return validations, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def print_epochs(title: str, ours: list[Epoch]) -> None:
    """Ours beside the recorded run's, epoch by epoch."""
    print(f"\n{title}")
    print(f"{'':>7} {'loss':>15} {'full_acc/0':>15} {'/1':>15} {'/2':>15} {'pooled':>13} replay")
    print(f"{'epoch':>7}" + f" {'ours':>7} {'peer':>7}" * 4 + f" {'ours':>6} {'peer':>6}")
    for index, epoch in enumerate(ours):
        peer = PEER[index] if index < len(PEER) else None
        cells = [
            f"{epoch.loss:>7.3f} {'' if peer is None else f'{peer.loss:.3f}':>7}",
            *(
                f"{value:>7.4f} {'' if peer is None else f'{peer.full_acc[step]:.4f}':>7}"
                for step, value in enumerate(epoch.full_acc)
            ),
            f"{epoch.pooled:>6.3f} {'' if peer is None else f'{peer.pooled:.3f}':>6}",
        ]
        print(f"{index + 1:>7} {' '.join(cells)} {epoch.replay:.3f}")


def compare(ours: Epoch, peer: Epoch, where: str) -> dict[str, float]:
    """Accuracy, and drafts accepted per pass, as ratios."""
    return {
        f"accuracy_{where}": ours.full_acc[0] / peer.full_acc[0],
        f"accepted_{where}": (ours.pooled - 1) / (peer.pooled - 1),
    }


def finish(ratios: dict[str, float], args: argparse.Namespace) -> int:
    """Hardware, misses, and the JSON as the last line."""
    print(f"\neagle3 {__version__}, torch {torch.__version__}, {platform.processor() or 'cpu'}, "
          f"{os.cpu_count()} cores, one thread{', quick' if args.quick else ''}")  # fmt: skip
    missed = [k for k, v in THRESHOLDS.items() if k in ratios and ratios[k] < v]
    for key in missed:
        print(f"below threshold: {key} = {ratios[key]:.3f}, at least {THRESHOLDS[key]}")
    line = json.dumps({key: round(value, 4) for key, value in ratios.items()})
    if args.out is not None:
        args.out.write_text(line + "\n")
    print(line)
    return int(args.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
