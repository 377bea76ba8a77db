"""Lightning callbacks: terminal, throughput, when to validate, what is saved."""

from eagle3.callbacks.checkpoints import AtomicCheckpointIO, checkpoint_callbacks
from eagle3.callbacks.progress import Progress
from eagle3.callbacks.throughput import Throughput
from eagle3.callbacks.validation import ValidationSchedule

__all__ = [
    "AtomicCheckpointIO",
    "Progress",
    "Throughput",
    "ValidationSchedule",
    "checkpoint_callbacks",
]
