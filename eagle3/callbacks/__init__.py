"""Lightning callbacks: terminal, throughput, when to validate and to stop, what is saved."""

from eagle3.callbacks.checkpoint_io import AtomicCheckpointIO
from eagle3.callbacks.checkpoints import CheckpointPolicy
from eagle3.callbacks.early_stop import EarlyStop
from eagle3.callbacks.progress import Progress
from eagle3.callbacks.throughput import Throughput
from eagle3.callbacks.validation import ValidationSchedule

__all__ = [
    "AtomicCheckpointIO",
    "CheckpointPolicy",
    "EarlyStop",
    "Progress",
    "Throughput",
    "ValidationSchedule",
]
