"""Where metrics go: always a CSV file, and Weights & Biases when it can be had; never a crash.

Both use optimizer steps (``trainer/global_step``) as the one x-axis, for training and validation.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import netrc
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from lightning.pytorch.loggers import Logger, WandbLogger

from eagle3.config import Config
from eagle3.names import WandbMode
from eagle3.provenance import Run
from eagle3.resume import Saved
from eagle3.run_folder import METRICS_FILE, X_AXIS, read_metrics

_INIT_TIMEOUT_S = 60.0
_FINISH_TIMEOUT_S = 300.0  # a lost network must not hold up the next job of a sweep
_PUBLIC_HOSTS = {"api.wandb.ai", "api.forge.coreweave.com"}  # wandb >= 0.31 moved to the second


class CsvLogger(Logger):
    """Rows of metrics, one per call, each on disk before the next step.

    A column that appears later (validation) makes the file be written anew, through a temporary
    file, so a reader or a crash never meets a half-written table. So does a disk that was full: its
    rows follow when there is room.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._columns: list[str] = [X_AXIS]
        self._rows: list[dict[str, float]] = []
        self._behind = False

    @property
    def rows(self) -> int:
        """Rows in the file."""
        return len(self._rows)

    def go_on_after(self, rows: int) -> list[dict[str, float]]:
        """Cut the file that an earlier process has left to its first ``rows``; returns the rest."""
        found = read_metrics(self.path.parent)
        self._rows, cut = found[:rows], found[rows:]
        self._columns += sorted({name for row in self._rows for name in row} - {X_AXIS})
        self._write_anew()
        return cut

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: ``config.yaml`` of the run folder holds them."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        row = {X_AXIS: float(step or 0), **metrics}
        self._rows.append(row)
        new = sorted(set(row) - set(self._columns))
        self._columns += new
        try:
            if new or len(self._rows) == 1 or self._behind:
                self._write_anew()
            else:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(self._text([row], header=False))
        except OSError as error:
            if not self._behind:
                print(f"warning: {self.path} cannot be written now ({error.strerror})", flush=True)
            self._behind = True
        else:
            self._behind = False

    def _write_anew(self) -> None:
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(self._text(self._rows, header=True), encoding="utf-8")
        temporary.replace(self.path)

    def _text(self, rows: list[dict[str, float]], *, header: bool) -> str:
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, self._columns, lineterminator="\n")
        if header:
            writer.writeheader()
        writer.writerows({k: f"{v:.10g}" for k, v in row.items()} for row in rows)
        return buffer.getvalue()


class NewRowsLogger(WandbLogger):
    """Leaves out rows that W&B already has, when a run trains some of its steps once more.

    Args:
        known: rows of ``metrics.csv`` that an earlier process has logged after the checkpoint.
    """

    def __init__(self, known: Sequence[Mapping[str, float]], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._known = {_row_key(row[X_AXIS], row) for row in known}

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if _row_key(step or 0, metrics) not in self._known:
            super().log_metrics(dict(metrics), step)


def _row_key(step: float, names: Iterable[str]) -> tuple[int, bool]:
    """Which row it is: a step has one of training and at most one of validation."""
    return int(step), any(name.startswith("val/") for name in names)


@dataclass(frozen=True)
class Loggers:
    """The loggers of one process; empty but on global rank 0."""

    lightning: list[Logger] = field(default_factory=list)
    """For ``Trainer(logger=...)``."""
    wandb_run: Any = None
    """The live W&B run, if there is one."""

    def rows(self) -> int:
        """Rows of ``metrics.csv`` so far; 0 where none is written."""
        return sum(logger.rows for logger in self.lightning if isinstance(logger, CsvLogger))

    def summary(self, values: Mapping[str, Any]) -> None:
        """Put final figures into the W&B summary."""
        if self.wandb_run is not None:
            self.wandb_run.summary.update(dict(values))

    def finish(self, exit_code: int) -> None:
        """End the W&B run, so that the next job of this process gets its own."""
        if self.wandb_run is not None:
            try:
                self.wandb_run.finish(exit_code=exit_code)
            except Exception as error:
                print(f"W&B did not finish cleanly ({_first_line(error)}); metrics.csv is complete")


def start_loggers(config: Config, run: Run) -> Loggers:
    """CSV and, if the configuration and the machine allow, W&B; nothing off global rank 0."""
    if not run.is_main:
        return Loggers()
    table = CsvLogger(run.directory / METRICS_FILE)
    known: list[dict[str, float]] = []
    if run.continues:
        assert run.checkpoint is not None
        known = table.go_on_after(Saved.read(run.checkpoint).rows)
    mode = wandb_mode(config.logger.wandb, os.environ)
    wandb_run = None if mode == WandbMode.disabled else _start_wandb(config, run, mode)
    if wandb_run is None:
        return Loggers([table])
    wandb_logger = NewRowsLogger(
        known, project=config.logger.project, save_dir=run.directory, experiment=wandb_run
    )
    return Loggers([table, wandb_logger], wandb_run)


def wandb_mode(mode: WandbMode, environment: Mapping[str, str]) -> WandbMode:
    """Resolve ``auto``: what ``WANDB_MODE`` says, else online if an API key is at hand."""
    if mode != WandbMode.auto:
        return mode
    if environment.get("WANDB_MODE") in ("online", "offline", "disabled"):
        return WandbMode(environment["WANDB_MODE"])
    has_key = bool(environment.get("WANDB_API_KEY")) or _netrc_has_key(environment)
    return WandbMode.online if has_key else WandbMode.offline


def _netrc_has_key(environment: Mapping[str, str]) -> bool:
    own_server = urlparse(environment.get("WANDB_BASE_URL", "")).hostname
    hosts = {own_server} if own_server else _PUBLIC_HOSTS
    path = Path(environment.get("NETRC", "~/.netrc")).expanduser()
    try:
        return not hosts.isdisjoint(netrc.netrc(str(path)).hosts)
    except (OSError, netrc.NetrcParseError):
        return False


def _start_wandb(config: Config, run: Run, mode: WandbMode) -> Any:
    """The live run; null, after one line, when W&B cannot start."""
    import wandb  # more than a second that a run without it need not wait for

    try:
        wandb_run = wandb.init(
            project=config.logger.project,
            name=run.name,
            id=run.id,
            group=run.group,
            job_type="train",
            config=dataclasses.asdict(config),
            dir=run.directory,
            mode=mode.value,  # type: ignore[arg-type]
            reinit="create_new",
            resume="allow",
            settings=wandb.Settings(
                init_timeout=_INIT_TIMEOUT_S,
                finish_timeout=_FINISH_TIMEOUT_S,
                silent=mode == WandbMode.offline,
            ),
        )
        wandb_run.define_metric(X_AXIS)
        wandb_run.define_metric("*", step_metric=X_AXIS, step_sync=True)
    except Exception as error:
        if mode == WandbMode.online:
            print(f"W&B did not start online ({_first_line(error)}): recording offline")
            wandb.teardown()  # its service still holds the run id for the attempt that failed
            return _start_wandb(config, run, WandbMode.offline)
        print(f"W&B did not start ({_first_line(error)}): going on with {METRICS_FILE} only")
        return None
    where = wandb_run.url if mode == WandbMode.online else f"offline, {Path(wandb_run.dir).parent}"
    print(f"W&B: {where}")
    return wandb_run


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
