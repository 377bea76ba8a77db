"""Before hours of training: ``python -m eagle3.preflight experiment=kimi_100k card=h100``.

Takes the overrides of ``eagle3.train``; exit code 2 when that should not start.
"""

from __future__ import annotations

import sys

from eagle3.compose import Job, entry_point
from eagle3.config import Config
from eagle3.errors import ConfigError
from eagle3.names import RehearsalPlace
from eagle3.terminal import JobFailedError


def main(config: Config, job: Job) -> None:
    """Print the report, and write it to ``preflight_json``.

    Raises:
        ConfigError: a rehearsal is asked for, whose sizes and data are not those of the run.
    """
    if config.rehearsal.place is not RehearsalPlace.off:
        raise ConfigError(
            f"found rehearsal.place={config.rehearsal.place}, expected none: preflight judges the "
            "run itself. Leave +rehearsal out here, and rehearse with eagle3.train"
        )
    # seconds of imports that a mistyped command need not wait for
    from eagle3.preflighting.command import preflight, write_json

    report = preflight(config)
    print("\n".join(report.lines()))
    write_json(config, report)
    if report.exit_code:
        raise JobFailedError(report.exit_code)


if __name__ == "__main__":
    sys.exit(entry_point(main))
