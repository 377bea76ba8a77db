"""Before hours of training: ``python -m eagle3.preflight experiment=kimi_100k card=h100``.

Takes the overrides of ``eagle3.train``; exit code 2 when that should not start.
"""

from __future__ import annotations

import sys

from eagle3.compose import Job, JobFailedError, entry_point
from eagle3.config import Config
from eagle3.preflighting.command import preflight, write_json


def main(config: Config, job: Job) -> None:
    """Print the report, and write it to ``preflight_json``."""
    report = preflight(config)
    print("\n".join(report.lines()))
    write_json(config, report)
    if report.exit_code:
        raise JobFailedError(report.exit_code)


if __name__ == "__main__":
    sys.exit(entry_point(main))
