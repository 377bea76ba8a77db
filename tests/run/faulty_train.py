"""Training with faults that are planted by step: ``python -m tests.run.faulty_train FAULTS ...``.

FAULTS is a list such as ``huge:25,nan:30,hang:40``, the rest the command line of eagle3.train.
"""

from __future__ import annotations

import sys
import time

from torch import Tensor

from eagle3.compose import entry_point
from eagle3.module import DrafterModule
from eagle3.train import train

HUGE = 1e6
HANG_S = 2.0


class Planted:
    """Changes the loss that goes into the backward pass of certain windows, or holds it up."""

    def __init__(self, text: str) -> None:
        pairs = [entry.split(":") for entry in text.split(",") if entry]
        self._faults = {int(step): kind for kind, step in pairs}
        self._backward = DrafterModule.manual_backward
        self._window = 0

    def __call__(self, module: DrafterModule, loss: Tensor) -> None:
        self._window += 1
        kind = self._faults.get(self._window)
        if kind == "hang":
            time.sleep(HANG_S)
        factor = {"huge": HUGE, "nan": float("nan")}.get(kind or "", 1.0)
        self._backward(module, loss * factor)


if __name__ == "__main__":
    planted = Planted(sys.argv.pop(1))
    DrafterModule.manual_backward = (  # type: ignore[assignment, method-assign]
        lambda module, loss: planted(module, loss)
    )
    sys.exit(entry_point(train))
