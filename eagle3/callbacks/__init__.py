"""Lightning callbacks: what the terminal shows, what throughput is logged, what is saved."""

from eagle3.callbacks.checkpoints import AtomicCheckpointIO, checkpoint_callbacks
from eagle3.callbacks.progress import Progress
from eagle3.callbacks.throughput import Throughput

__all__ = ["AtomicCheckpointIO", "Progress", "Throughput", "checkpoint_callbacks"]
