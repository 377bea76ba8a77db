"""What a look at captured states finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

Choose = Callable[[int], NDArray[np.int64]]
"""Number of samples -> those to look at, ascending."""


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong."""

    path: str
    what: str
    """What was found and expected, and what to do."""
    sample: str | None = None
    """Id of the sample; None: the file as a whole."""
    first_byte: int | None = None
    """Of the damaged range; None: not known."""
    stop_byte: int | None = None

    def line(self) -> str:
        """For people."""
        where = [self.path] if not self.what.startswith(self.path) else []
        if self.sample is not None:
            where.append(f"sample {self.sample}")
        if self.first_byte is not None and self.stop_byte is not None:
            where.append(f"bytes {self.first_byte:,} to {self.stop_byte - 1:,}")
        return f"{', '.join(where)}: {self.what}" if where else self.what

    def as_dict(self) -> dict[str, object]:
        """For programs."""
        return asdict(self)


@dataclass(frozen=True)
class Result:
    """What was looked at, and what is wrong."""

    num_samples: int
    """In the directory."""
    num_checked: int
    num_bytes: int
    """That were read."""
    checks: tuple[str, ...]
    """What was compared, for people."""
    unchecked: tuple[str, ...]
    """What could not be, and why."""
    damages: tuple[Damage, ...]
