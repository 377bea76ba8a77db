"""One training step in a process of its own: peak memory over its inputs. Prints JSON.

    python tests/planning/measured_step.py CASE.json

CASE: ``sizes`` of :class:`step_case.StepSizes`, ``compute``, ``ttt_steps``, ``lm_head_trainable``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import get_type_hints

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from step_case import StepSizes, build_case, measure

from eagle3.config import ComputeConfig
from eagle3.objective import row_counts, run_pack, step_weights


def main() -> None:
    case = json.loads(Path(sys.argv[1]).read_text())
    drafter, head, batch = build_case(StepSizes(**case["sizes"]), seed=0)
    drafter.lm_head.weight.requires_grad_(case["lm_head_trainable"])
    kinds = get_type_hints(ComputeConfig)
    compute = ComputeConfig(**{name: kinds[name](value) for name, value in case["compute"].items()})
    ttt_steps = case["ttt_steps"]
    weights = step_weights(row_counts([batch], ttt_steps), step_loss_decay=1.0, world_size=1)

    def run() -> None:
        result = run_pack(
            drafter, head, batch, batch.aux_hidden, ttt_steps=ttt_steps, mix=[("kl", 1.0)],
            compute=compute, weights=weights,
        )  # fmt: skip
        result.loss.backward()
        # Gradients that the next call found would count as its inputs.
        drafter.zero_grad(set_to_none=True)

    print(json.dumps({"peak_bytes": measure(run, repeats=1).peak_bytes}))


if __name__ == "__main__":
    main()
