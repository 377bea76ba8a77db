"""What a preflight found: judgements, what could not be checked, tables and facts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from eagle3.errors import ConfigError, UserError
from eagle3.inspection.facts import Finding, Severity

T = TypeVar("T")
_MARKS = {Severity.ok: "ok", Severity.warning: "WARNING", Severity.stop: "STOP"}
_STOPPED = 2
COLUMNS = ("verdict", "topic", "found", "action")


@dataclass(frozen=True)
class Unchecked:
    """Something that was not looked at, and what it would take."""

    topic: str
    reason: str


@dataclass
class Report:
    """Filled by one check after another."""

    findings: list[Finding] = field(default_factory=list)
    unchecked: list[Unchecked] = field(default_factory=list)
    tables: list[list[str]] = field(default_factory=list)
    """For people only."""
    facts: dict[str, object] = field(default_factory=dict)
    """Plain values, for programs only."""

    def ok(self, topic: str, reason: str) -> None:
        self.findings.append(Finding(Severity.ok, topic, reason))

    def warn(self, topic: str, reason: str, action: str) -> None:
        self.findings.append(Finding(Severity.warning, topic, reason, action))

    def stop(self, topic: str, reason: str, action: str = "") -> None:
        self.findings.append(Finding(Severity.stop, topic, reason, action))

    def skip(self, topic: str, reason: str) -> None:
        self.unchecked.append(Unchecked(topic, reason))

    def attempt(self, topic: str, act: Callable[[], T]) -> T | None:
        """The result of ``act``; None after an error for users, each line of which is a stop."""
        try:
            return act()
        except UserError as error:
            for line in str(error).splitlines():
                self.stop(topic, line.strip())
        return None

    @property
    def stops(self) -> list[Finding]:
        """Reasons not to train."""
        return [found for found in self.findings if found.severity is Severity.stop]

    @property
    def exit_code(self) -> int:
        """0; 2 when training should not start."""
        return _STOPPED if self.stops else 0

    def lines(self) -> list[str]:
        """Everything, for people."""
        tables = [line for table in self.tables for line in (*table, "")]
        topics = [found.topic for found in self.findings] + [one.topic for one in self.unchecked]
        width = max(map(len, topics), default=0)
        rows = [line for found in self.findings for line in _finding_lines(found, width)]
        rows += [f"  {'-':<8} {one.topic:<{width}} not checked: {one.reason}"
                 for one in self.unchecked]  # fmt: skip
        return [*tables, *rows, self.summary()]

    def rows(self) -> list[list[str]]:
        """Of a table with :data:`COLUMNS`: findings in order, then what was not checked."""
        found = [[_MARKS[one.severity], one.topic, one.reason, one.action] for one in self.findings]
        return found + [["not checked", one.topic, one.reason, ""] for one in self.unchecked]

    def short_lines(self) -> list[str]:
        """Warnings and stops, and a summary: for the start of a training run."""
        loud = [found for found in self.findings if found.severity is not Severity.ok]
        return [
            *(
                f"{'stop' if found.severity is Severity.stop else 'warning'}: {_sentence(found)}"
                for found in loud
            ),
            self.summary(),
        ]

    def summary(self) -> str:
        """``preflight: 9 ok, 1 warning, 0 stops, 2 not checked``."""
        ok, warnings, stops = (
            sum(found.severity is severity for found in self.findings) for severity in Severity
        )
        return (
            f"preflight: {ok} ok, {warnings} warning{'s' * (warnings != 1)}, "
            f"{stops} stop{'s' * (stops != 1)}, {len(self.unchecked)} not checked"
        )

    def as_dict(self) -> dict[str, object]:
        """For programs."""
        return {
            "exit_code": self.exit_code,
            "findings": [asdict(found) for found in self.findings],
            "not_checked": [asdict(one) for one in self.unchecked],
            "facts": self.facts,
        }

    def write(self, path: Path) -> None:
        """Write :meth:`as_dict` as JSON.

        Raises:
            ConfigError: the file cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"preflight_json={path}: cannot be written ({error.strerror}), give another file"
            ) from error


def _finding_lines(found: Finding, width: int) -> list[str]:
    head = f"  {_MARKS[found.severity]:<8} {found.topic:<{width}} {found.reason}"
    return [head, *([f"{'':<{width + 12}}-> {found.action}"] if found.action else [])]


def _sentence(found: Finding) -> str:
    action = f": {found.action}" if found.action else ""
    return f"{found.topic}: {found.reason}{action}"
