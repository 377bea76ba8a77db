"""A rehearsal that is killed: ``python -m eagle3.rehearsal experiment=kimi_100k``.

Takes the overrides of ``eagle3.train``; ``+rehearsal=cpu`` is added. The rehearsal runs three
times with these, twice not to its end::

    whole          from the first step to the last
    interrupted    SIGKILL to every process | resume=auto, SIGTERM | resume=auto to the end

Both must end with the same weights and have the same metric at every step: to the bit on one or two
ranks, up to rounding on more. Exit status: 0, 1 when they differ, 2 when a run failed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from eagle3.checks import device_count
from eagle3.compose import compose_config
from eagle3.errors import TrainingError, UserError
from eagle3.rehearsing.comparison import differences, last_step
from eagle3.terminal import print_lines_at_once, report_error

_GROUP = "+rehearsal="
_OWN = ("trainer.log_every_steps=1",)
"""Every step is a row to compare, and tells when to interrupt."""
_POLL_S = 0.05
_ROUNDING = 1e-5
"""Relative difference that is allowed to more than two ranks. Their sums depend on the order of
addition, and so may change in the last bit; of two numbers there is one sum only."""


@dataclass(frozen=True)
class Show:
    """Where the runs of one rehearsal lie, and how they are started."""

    root: Path
    overrides: tuple[str, ...]

    def start(self, name: str, *overrides: str) -> subprocess.Popen[bytes]:
        """A run below ``root/name``, in a session of its own."""
        arguments = (*self.overrides, *_OWN, *overrides, f"paths.output={self.root / name}")
        return subprocess.Popen(
            [sys.executable, "-m", "eagle3.train", *arguments], start_new_session=True
        )

    def folder(self, name: str) -> Path:
        """The one run folder below ``root/name``.

        Raises:
            TrainingError: there is another number of them.
        """
        found = [path.parent for path in (self.root / name).glob("*/config.yaml")]
        if len(found) != 1:
            raise TrainingError(
                f"{self.root / name}: found {len(found)} run folders, expected one that every "
                "start goes on in; read above what resume=auto said"
            )
        return found[0]


def main(overrides: Sequence[str]) -> int:
    """Run, interrupt, compare; prints a verdict and returns the exit code."""
    print_lines_at_once()
    try:
        return _rehearse(with_group(overrides))
    except UserError as error:
        return report_error(error)


def with_group(overrides: Sequence[str]) -> tuple[str, ...]:
    """``+rehearsal=cpu`` comes before what may change it."""
    named = any(override.startswith(_GROUP) for override in overrides)
    return tuple(overrides) if named else (f"{_GROUP}cpu", *overrides)


def _rehearse(overrides: tuple[str, ...]) -> int:
    config = compose_config(overrides)
    several = device_count(config.trainer.devices) > 2
    output = Path(config.paths.output)
    show = Show(output / f"rehearsal_{datetime.now():%Y%m%d-%H%M%S-%f}", overrides)
    print("== the whole run")
    _finish(show.start("whole"))
    whole = show.folder("whole")
    total = last_step(whole)
    print(f"== the same run, killed after a third of its {total} steps")
    killed = _interrupt(show, total // 3, signal.SIGKILL)
    print("== it goes on, and is asked to stop after two thirds")
    stopped = _interrupt(show, 2 * total // 3, signal.SIGTERM)
    print("== it goes on to its end")
    _finish(show.start("interrupted", "resume=auto"))
    found = differences(show.folder("interrupted"), whole, _ROUNDING * several)
    print(f"\nrehearsal in {show.root}")
    print(f"SIGKILL at step {killed}, SIGTERM at step {stopped} of {total}, resume=auto each time")
    for line in found:
        print(f"DIFFERENT: {line}")
    if not found:
        how = f"equal up to rounding ({_ROUNDING:g})" if several else "equal to the bit"
        print(f"final weights {how}, every metric too, at every step")
    return int(bool(found))


def _finish(process: subprocess.Popen[bytes]) -> None:
    try:
        code = process.wait()
    finally:
        _signal_session(process.pid, signal.SIGKILL)
    if code:
        raise TrainingError(
            f"the run ended with exit status {code}, expected 0: its message stands above"
        )


def _interrupt(show: Show, step: int, signum: signal.Signals) -> int:
    """Send ``signum`` when ``step`` is logged; the step that was logged last in the end.

    Raises:
        TrainingError: the run ended before, or answered SIGTERM with another exit status than 75.
    """
    process = show.start("interrupted", "resume=auto")
    try:
        while not any(
            last_step(path.parent) >= step
            for path in (show.root / "interrupted").glob("*/config.yaml")
        ):
            if process.poll() is not None:
                raise TrainingError(
                    f"the run ended with exit status {process.returncode} before step {step}, "
                    "where it was to be interrupted: its message stands above"
                )
            time.sleep(_POLL_S)
        if signum is signal.SIGTERM:
            process.send_signal(signum)
            if process.wait() != os.EX_TEMPFAIL:
                raise TrainingError(
                    f"after SIGTERM the run ended with exit status {process.returncode}, expected "
                    f"{os.EX_TEMPFAIL}: saved and ready to go on"
                )
    finally:
        _signal_session(process.pid, signal.SIGKILL)
        process.wait()
    return last_step(show.folder("interrupted"))


def _signal_session(leader: int, signum: signal.Signals) -> None:
    for pid in list(_session(leader)):
        try:
            os.kill(pid, signum)
        except ProcessLookupError:  # ended meanwhile
            continue


def _session(leader: int) -> Iterator[int]:
    """Processes that ``leader`` and its descendants have started, itself included."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:  # ended meanwhile
            continue
        if int(fields[3]) == leader:
            yield int(entry.name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
