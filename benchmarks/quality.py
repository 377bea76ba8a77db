"""Quality against a recorded run of another EAGLE-3 trainer, at equal epochs and equal CPU time.

    python benchmarks/quality.py [--quick] [--check] [--out FILE]

212 greedy answers of SmolLM2-135M-Instruct; the last 11 are for validation. Settings of the recorded
run: packs of 512, three TTT steps, forward KL, noise 0.05, AdamW, lr 1e-3, cosine over six epochs,
1 % warmup, clip 1.0, frozen draft head, one thread, float32. Its figures (speculators 0.9.0, one
seed) were recorded on a machine of the same kind and are constants below. Its accuracy counts
agreement within the draft vocabulary; ours also counts tokens outside of it as wrong.
"""

from __future__ import annotations

import argparse
import csv
import gzip
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

import eagle3
from eagle3.data.vocab import VocabMap, save_vocab_map
from eagle3.prefill import TokenSequence, capture_sequences
from eagle3.verifier.smollm2 import ensure_smollm2

TOKENS = Path(__file__).parents[1] / "tests" / "assets" / "smollm2_baseline_212.jsonl.gz"
VALIDATION_LINES = 11
DRAFT_VOCAB, VERIFIER_VOCAB = 8192, 49152
PEER_CPU_S_PER_EPOCH = 103.0
PEER = [
    (15.897, 0.1828, 0.0235, 0.0027, 1.209),
    (13.287, 0.2130, 0.0302, 0.0020, 1.245),
    (11.834, 0.2722, 0.0598, 0.0108, 1.343),
    (10.824, 0.2964, 0.0672, 0.0168, 1.380),
    (10.477, 0.3192, 0.0820, 0.0195, 1.421),
    (10.371, 0.3192, 0.0813, 0.0175, 1.418),
]
"""Per epoch: validation loss summed over three steps, full_acc 0..2, pooled acceptance length."""


@dataclass(frozen=True)
class Epoch:
    """One validation of ours, in the recorded run's terms."""

    loss: float
    full_acc: tuple[float, float, float]
    pooled: float
    replay: float


def main() -> int:
    args = _arguments()
    epochs = 1 if args.quick else len(PEER)
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(args.work or scratch)
        overrides = prepare(work, Path(args.cache))
        equal, equal_cpu = train(work, overrides, epochs)
        print_epochs(equal, equal_cpu)
        result = {
            "pooled_minus_1_ratio_equal_epochs": (equal[-1].pooled - 1) / (PEER[epochs - 1][4] - 1),
            "accuracy_ratio_equal_epochs": equal[-1].full_acc[0] / PEER[epochs - 1][1],
            "cpu_ratio_equal_epochs": equal_cpu / (PEER_CPU_S_PER_EPOCH * epochs),
        }
        if not args.quick:
            more = max(epochs, int(epochs / result["cpu_ratio_equal_epochs"]))
            longer, cpu = train(work, overrides, more)
            print(
                f"\nat equal CPU seconds: {more} epochs in {cpu:.0f} CPU s, the recorded run used "
                f"{PEER_CPU_S_PER_EPOCH * epochs:.0f} CPU s for {epochs}"
            )
            print_epochs(longer[-1:], cpu)
            result["pooled_minus_1_ratio_equal_cpu"] = (longer[-1].pooled - 1) / (PEER[-1][4] - 1)
            result["accuracy_ratio_equal_cpu"] = longer[-1].full_acc[0] / PEER[-1][1]
    return finish(result, args)
