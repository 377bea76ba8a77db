"""One rank of a run whose ranks were launched by :func:`eagle3.distributed.launch_ranks`."""

from __future__ import annotations

import sys
from pathlib import Path

from eagle3.compose import load_config, report_error
from eagle3.distributed import end_with_parent, process_group
from eagle3.provenance import CONFIG_FILE, load_run


def main(run_dir: Path) -> int:
    """Train as one of the ranks of the run in ``run_dir``; returns the exit code."""
    end_with_parent()
    try:
        config = load_config(run_dir / CONFIG_FILE)
        with process_group(config) as ranks:
            from eagle3.fit import fit  # seconds of imports, after the ranks have met

            fit(config, load_run(run_dir, is_main=ranks.rank == 0))
    except Exception as error:
        return report_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
