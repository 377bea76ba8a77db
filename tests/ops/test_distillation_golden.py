"""Distillation losses against losses stored by another trainer, from its logits alone.

Step k of a case: ``decay**k * sum(loss of rows i) / (count + 1e-5)`` over rows i whose target row
i + k lies in the same document and carries loss. Rows that cross documents are left out on both
sides (``clean.loss_k``).
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.ops.losses import ROW_LOSSES

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = [f"s{number:02d}" for number in range(1, 21)]
OUR_NAMES = {"kl_div": "kl", "rkl": "reverse_kl", "jsd": "js"}


def _mix(loss: str) -> list[tuple[str, float]]:
    weights = json.loads(loss) if loss.startswith("{") else {loss: 1.0}
    return [(OUR_NAMES.get(name, name), weight) for name, weight in weights.items()]


@pytest.mark.parametrize("implementation", ROW_LOSSES)
@pytest.mark.parametrize("case", CASES)
def test_step_losses_of_stored_logits(case: str, implementation: str) -> None:
    (path,) = GOLDEN.glob(f"{case}_*.safetensors")
    tensors = load_file(path)
    config = json.loads(path.with_suffix(".json").read_text())
    targets = tensors["mid.targets"][0]
    documents = tensors["batch.document_ids"][0]
    mask = tensors["batch.loss_mask"][0].bool()
    for step in range(config["ttt_steps"]):
        rows = torch.arange(len(documents) - step)
        rows = rows[(documents[rows] == documents[rows + step]) & mask[rows + step]]
        logits = tensors[f"mid.logits_{step}"][0][rows]
        losses = ROW_LOSSES[implementation](logits, targets[rows + step], _mix(config["loss"]))
        found = config["ttt_step_loss_decay"] ** step * losses.sum() / (len(rows) + 1e-5)
        torch.testing.assert_close(found, tensors[f"clean.loss_{step}"][0], rtol=1e-5, atol=0)
