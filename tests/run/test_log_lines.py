"""What the package logs reaches the person who waits."""

import subprocess
import sys

SCRIPT = """
import logging
from eagle3.log_lines import show_log_lines
show_log_lines()
show_log_lines()
logger = logging.getLogger("eagle3.data.index")
logger.info("indexing: %d of %d files", 1, 2)
logger.warning("a disk is slow")
logging.getLogger("elsewhere").info("not shown")
"""


def test_progress_and_warnings_are_printed_once_and_alike() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["indexing: 1 of 2 files", "warning: a disk is slow"]
    assert done.stderr == ""
