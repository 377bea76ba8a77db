"""One job of a pool as a file: what its process reads, and what it leaves behind."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.errors import ConfigError

OPTION = "--pool-job"
"""With a file behind it: run this one job instead of composing from the command line."""
_FOLDER = "jobs"


@dataclass(frozen=True)
class PoolJob:
    """A job whose configuration is composed, but not yet checked against the schema."""

    number: int
    """Place in the sweep, from 0."""
    sweep_dir: Path
    experiment: str | None
    overrides: tuple[str, ...]
    """What makes this job differ from the others, with what all of them were given."""
    config: dict[str, Any]
    """Plain tree without interpolations."""

    @property
    def devices(self) -> int:
        """Devices that the job takes from the pool.

        Raises:
            ConfigError: ``trainer.devices`` is no count.
        """
        from eagle3.checks import device_count  # imports torch, which not every job needs

        devices = self.config.get("trainer", {}).get("devices", 1)
        if isinstance(devices, list):
            raise ConfigError(
                f"job #{self.number}: trainer.devices={devices} names cards, but in a pool the "
                f"launcher gives each job its cards: trainer.devices={len(devices)}, and "
                f"hydra.launcher.cards={devices} if the pool is to hold these only"
            )
        return device_count(devices)

    @property
    def file(self) -> Path:
        return self._path("json")

    @property
    def log(self) -> Path:
        """What the job prints."""
        return self._path("log")

    @property
    def value(self) -> float | None:
        """What the job returned; null when it did not come to its end."""
        path = self._path("value")
        if not path.is_file():
            return None
        value: float | None = json.loads(path.read_text(encoding="utf-8"))
        return value

    def keep_value(self, value: float | None) -> None:
        """Leave what the job returned for the launcher."""
        self._path("value").write_text(json.dumps(value), encoding="utf-8")

    def write(self) -> Path:
        """Write the file for :meth:`read` and return its path; an older result is forgotten."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._path("value").unlink(missing_ok=True)
        content = dataclasses.asdict(self) | {"sweep_dir": str(self.sweep_dir)}
        self.file.write_text(json.dumps(content, indent=1), encoding="utf-8")
        return self.file

    @classmethod
    def read(cls, path: Path) -> PoolJob:
        """The job that :meth:`write` left in ``path``."""
        content = json.loads(path.read_text(encoding="utf-8"))
        content |= {
            "sweep_dir": Path(content["sweep_dir"]),
            "overrides": tuple(content["overrides"]),
        }
        return cls(**content)

    def _path(self, suffix: str) -> Path:
        return self.sweep_dir / _FOLDER / f"{self.number}.{suffix}"
