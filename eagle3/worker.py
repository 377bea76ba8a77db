"""One rank of a run whose ranks were started by :func:`eagle3.launch.launch_ranks`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from eagle3.compose import load_config
from eagle3.distributed import process_group
from eagle3.launch import end_with_launcher
from eagle3.provenance import load_run
from eagle3.run_folder import CONFIG_FILE
from eagle3.terminal import print_lines_at_once, report_error


def main(run_dir: Path) -> int:
    """Train as one of the ranks of the run in ``run_dir``; returns the exit code.

    Raises:
        SystemExit: with EX_TEMPFAIL, when a signal stopped the run.
    """
    print_lines_at_once()
    end_with_launcher()
    try:
        config = load_config(run_dir / CONFIG_FILE)
        with process_group(config) as ranks:
            from eagle3.fit import fit  # seconds of imports, after the ranks have met

            fit(config, load_run(run_dir, is_main=ranks.rank == 0))
    except Exception as error:
        code = report_error(error)
        sys.stdout.flush()
        os._exit(code)  # an orderly exit could wait for ranks that are stuck in a collective
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
