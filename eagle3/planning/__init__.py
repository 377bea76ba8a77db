"""What a run costs before it starts: floating point operations and memory of a training step.

Pure functions of sizes; no tensor is made. :mod:`eagle3.planning.sizes` says what a step is,
:mod:`eagle3.planning.work` counts its products, :mod:`eagle3.planning.memory` its bytes.
"""

from eagle3.planning.memory import MemoryPlan, longest_max_seq_len, plan
from eagle3.planning.phases import kept_bytes
from eagle3.planning.sizes import PackRows, PlannedDocument, Step
from eagle3.planning.work import Work, peer_bytes, peer_work, work

__all__ = [
    "MemoryPlan",
    "PackRows",
    "PlannedDocument",
    "Step",
    "Work",
    "kept_bytes",
    "longest_max_seq_len",
    "peer_bytes",
    "peer_work",
    "plan",
    "work",
]
