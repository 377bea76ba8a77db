"""One training step of this package in a process of its own. Prints JSON.

    python benchmarks/our_step.py SPEC.json fast|reference TTT_STEPS REPEATS

SPEC holds what :func:`step_case.build_case` takes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from step_case import Piece, StepSizes, build_case, measure

from eagle3.config import ComputeConfig
from eagle3.objective import row_counts, run_pack, step_weights

COMPUTE = {"fast": ComputeConfig(), "reference": ComputeConfig.reference()}


def main() -> None:
    path, name, *numbers = sys.argv[1:]
    ttt_steps, repeats = map(int, numbers)
    spec = json.loads(Path(path).read_text())
    pieces = [Piece(*piece) for piece in spec["pieces"]]
    drafter, head, batch = build_case(StepSizes(**spec["sizes"]), spec["seed"], pieces)
    losses = []

    def run() -> None:
        counts = row_counts([batch], ttt_steps)
        result = run_pack(
            drafter,
            head,
            batch,
            batch.aux_hidden,
            ttt_steps=ttt_steps,
            mix=[("kl", 1.0)],
            compute=COMPUTE[name],
            weights=step_weights(counts, step_loss_decay=1.0, world_size=1),
        )
        result.loss.backward()
        losses.append(float(result.loss.detach()))
        # Gradients that the next call found would count as its inputs, not as its peak.
        drafter.zero_grad(set_to_none=True)

    cost = measure(run, repeats)
    print(json.dumps({"loss": losses[-1], "cpu_s": cost.cpu_s, "peak_bytes": cost.peak_bytes}))


if __name__ == "__main__":
    main()
