"""Whether the bytes of captured states are still those that were written.

What can be known depends on the format:

===============  ================================================================================
native           manifest, index and shards by blake2b, every sample by CRC-32
speculators v1   every record of every file by the CRC-32 that ``torch.save`` wrote, and the zip
                 around the records by what it says twice (:mod:`eagle3.data.zip_structure`)
speculators 0.9  nothing but the structure, since the format has no checksums
===============  ================================================================================

In all of them: structure, token ids within the vocabulary, finite states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from eagle3.byte_progress import ByteProgress
from eagle3.data.disk import size
from eagle3.data.formats import FORMATS, open_store
from eagle3.data.layout import StateLayout
from eagle3.data.native import NativeStore, is_native
from eagle3.data.store import Store
from eagle3.errors import DataError
from eagle3.verification.files import check_files
from eagle3.verification.native import check_native
from eagle3.verification.result import Damage, Result

_LISTED = 20


@dataclass(frozen=True)
class VerifyReport:
    """What was looked at, and what is wrong."""

    directory: Path
    format: str
    result: Result
    seconds: float

    @property
    def damages(self) -> tuple[Damage, ...]:
        """What is wrong, in the order of the files."""
        return self.result.damages

    def lines(self) -> list[str]:
        """For people."""
        result = self.result
        rate = result.num_bytes / max(self.seconds, 1e-9) / 1e9
        rows = [
            ("directory", str(self.directory)),
            ("format", self.format),
            ("samples", f"{result.num_checked:,} of {result.num_samples:,}"),
            ("read", f"{size(result.num_bytes)} in {self.seconds:.1f} s, {rate:.2f} GB/s"),
            ("checked", ", ".join(result.checks)),
            ("not checked", ", ".join(result.unchecked) or "-"),
            ("damages", f"{len(self.damages):,}"),
        ]
        listed = [f"  {damage.line()}" for damage in self.damages[:_LISTED]]
        more = len(self.damages) - len(listed)
        return [
            *(f"{name:<12} {text}" for name, text in rows),
            *listed,
            *([f"  ... and {more:,} more (--json lists all)"] if more else []),
        ]

    def as_dict(self) -> dict[str, object]:
        """For programs; keys do not change within a version."""
        result = self.result
        return {
            "directory": str(self.directory),
            "format": self.format,
            "ok": not self.damages,
            "samples": result.num_samples,
            "samples_checked": result.num_checked,
            "bytes": result.num_bytes,
            "seconds": self.seconds,
            "gb_per_s": result.num_bytes / max(self.seconds, 1e-9) / 1e9,
            "checks": list(result.checks),
            "unchecked": list(result.unchecked),
            "damages": [damage.as_dict() for damage in self.damages],
        }


def verify(
    directory: Path,
    layout: StateLayout,
    log: Callable[[str], None],
    *,
    arrow: Path | None = None,
    num_samples: int | None = None,
    seed: int = 0,
    num_workers: int = 4,
) -> VerifyReport:
    """Read a directory and compare it with its checksums.

    Args:
        directory: In any known format.
        layout: Sizes that its states must have.
        log: Takes one line of progress at a time.
        arrow: See :func:`eagle3.data.formats.open_store`.
        num_samples: Look at so many samples, chosen at random; None: at everything.
        seed: Of that choice.
        num_workers: Threads; each reads one file at a time.

    Raises:
        DataError: there are no captured states in ``directory``; damages are in the report.
    """
    progress = ByteProgress("verify", 0, log)
    try:
        store: Store = open_store(directory, layout, arrow)
    except DataError as error:
        if not is_native(directory):
            raise
        damage = Damage(str(directory), str(error))
        result = Result(0, 0, 0, ("manifest",), ("everything else",), (damage,))
        return VerifyReport(directory, "native", result, progress.seconds)

    def choose(total: int) -> NDArray[np.int64]:
        if num_samples is None or num_samples >= total:
            return np.arange(total)
        chosen = np.random.default_rng(seed).choice(total, num_samples, replace=False)
        return np.sort(chosen)

    if isinstance(store, NativeStore):
        result = check_native(store, choose, num_workers, progress)
        return VerifyReport(directory, "native", result, progress.seconds)
    name = next(name for name, form in FORMATS.items() if form.is_here(directory))
    result = check_files(store, choose, num_workers, progress)
    return VerifyReport(directory, name, result, progress.seconds)
