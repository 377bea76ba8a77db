"""Where in the plan a run is: saved in every checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from eagle3.data.plan import EpochPlan
from eagle3.errors import DataError
from eagle3.names import DataChange


@dataclass(frozen=True)
class Position:
    """After so many optimizer steps of an epoch."""

    epoch: int
    step: int
    """Optimizer steps of this epoch that are done."""
    plan: str
    """Fingerprint of the epoch's plan."""
    data: str
    """Fingerprint of the documents."""

    @classmethod
    def of(cls, plan: EpochPlan, epoch: int, step: int, data: str) -> Position:
        """The position ``step`` steps into ``plan``."""
        return cls(epoch, step, plan.fingerprint, data)

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Position:
        """Inverse of :meth:`to_dict`."""
        return cls(**state)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return asdict(self)

    def check(self, data: str, on_change: DataChange) -> None:
        """Refuse to continue on other documents.

        Raises:
            DataError: the fingerprints differ and ``on_change`` is ``refuse``.
        """
        if data != self.data and on_change is DataChange.refuse:
            raise DataError(
                f"the documents changed: the checkpoint was trained on fingerprint {self.data}, "
                f"found {data}. A file was added, removed or captured with other tokens. Restore "
                "the directory, or set data.on_change=accept to train the rest of the epoch on the "
                "documents that are there now (the order of packs is then another one)."
            )

    def first_step(self, epoch: int, plan: EpochPlan, on_change: DataChange) -> int:
        """The step of ``plan`` that comes next, if the run stopped within this epoch.

        Raises:
            DataError: the plan is another one and ``on_change`` is ``refuse``.
        """
        if epoch != self.epoch or self.step >= plan.steps:
            return 0
        if plan.fingerprint != self.plan and on_change is DataChange.refuse:
            raise DataError(
                f"the plan of epoch {epoch} changed: the checkpoint was trained with {self.plan}, "
                f"found {plan.fingerprint}. Expected the same max_seq_len, ttt_steps, seed, "
                "tokens_per_step, number of ranks and data.* settings as in the run that is "
                "continued, and the same loss masks in the captured files (the token ids are the "
                "same). Give them again, set data.on_change=accept, or begin a new run."
            )
        return self.step
