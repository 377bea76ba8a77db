"""Whether two runs of the same configuration were the same."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3.run_folder import METRICS_FILE, checkpoints

_MEASURED = "perf/"
"""Metrics of clocks, which differ in every run."""


def last_step(folder: Path) -> int:
    """Of the last whole row in ``metrics.csv``; 0 before there is one."""
    path = folder / METRICS_FILE
    if not path.is_file():
        return 0
    head, *rows = path.read_text(encoding="utf-8").split("\n")[:-1] or [""]
    column = head.split(",").index("trainer/global_step") if rows else 0
    return int(float(rows[-1].split(",")[column])) if rows else 0


def differences(folder: Path, expected: Path, tolerance: float = 0.0) -> list[str]:
    """What of the final weights and the metrics differs, a line each.

    Args:
        tolerance: of a number or of the norm of a weight, relative; 0: equal to the bit.
    """
    return [
        *_weight_differences(folder, expected, tolerance),
        *_metric_differences(folder, expected, tolerance),
    ]


def _weight_differences(folder: Path, expected: Path, tolerance: float) -> list[str]:
    ours, theirs = _final_weights(folder), _final_weights(expected)
    if ours.keys() != theirs.keys():
        return [f"names of weights: {sorted(ours.keys() ^ theirs.keys())}"]
    unequal = [name for name in ours if not _near(ours[name], theirs[name], tolerance)]
    return [f"final weights: {', '.join(unequal)}"] if unequal else []


def _metric_differences(folder: Path, expected: Path, tolerance: float) -> list[str]:
    ours, theirs = _rows(folder), _rows(expected)
    if len(ours) != len(theirs):
        return [f"{len(ours)} rows of metrics instead of {len(theirs)}"]
    for number, (row, other) in enumerate(zip(ours, theirs, strict=True), start=1):
        names = sorted(
            name
            for name in row.keys() | other.keys()
            if not _same(row.get(name), other.get(name), tolerance)
        )
        if names:
            return [f"row {number} of the metrics: {', '.join(names)}"]
    return []


def _near(weight: Tensor, other: Tensor, tolerance: float) -> bool:
    if weight.shape != other.shape or torch.equal(weight, other):
        return weight.shape == other.shape
    apart = (weight.double() - other.double()).norm()
    return bool(apart <= tolerance * other.double().norm())


def _same(value: str | None, other: str | None, tolerance: float) -> bool:
    if not value or not other or not tolerance:
        return value == other
    return math.isclose(float(value), float(other), rel_tol=tolerance, abs_tol=tolerance)


def _final_weights(folder: Path) -> dict[str, Any]:
    path = max(checkpoints(folder).glob("step*.ckpt"))
    weights: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    return weights


def _rows(folder: Path) -> list[dict[str, str]]:
    with (folder / METRICS_FILE).open(encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if not k.startswith(_MEASURED)} for row in found]
