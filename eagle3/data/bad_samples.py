"""Samples that could not be used: named, counted, and a stop when there are too many."""

from __future__ import annotations

from eagle3.errors import DataError

_LISTED = 20


class BadSamples:
    """The bad samples that one rank met in a run, each counted once however often it is met."""

    def __init__(self, limit: int, setting: str = "data.max_bad_samples") -> None:
        """``setting`` is what the user sets to another ``limit``."""
        self._limit, self._setting = limit, setting
        self._reasons: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._reasons)

    @property
    def lines(self) -> list[str]:
        """One line per sample: path, reason and next step."""
        return list(self._reasons.values())

    def add(self, sample: str, reason: str) -> None:
        """Count ``sample``, identified by its path.

        Raises:
            DataError: there are now more than the limit; lists them.
        """
        self._reasons.setdefault(sample, reason)
        if len(self) > self._limit:
            shown = self.lines[:_LISTED]
            more = [f"... and {len(self) - len(shown)} more"] if len(self) > len(shown) else []
            raise DataError(
                "\n".join(
                    [
                        f"{len(self)} bad samples, {self._setting} allows {self._limit}. "
                        f"Capture them again, remove the files, or raise {self._setting}:",
                        *(f"  {line}" for line in [*shown, *more]),
                    ]
                )
            )
