"""A disk that takes no checkpoint any more, in a real run: it stops by itself and can go on."""

from __future__ import annotations

import resource
import subprocess
from pathlib import Path

from tests.test_resume import DOCUMENTS, RUN, assert_same_run, logged, rows, wait_until
from tests.tiny_run import clean_environment, make_world, some_documents


def test_a_run_on_a_full_disk_ends_and_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Files larger than half a checkpoint are refused from the middle of the run."""
    world = make_world(tmp_path / "whole", some_documents(DOCUMENTS))
    world.run(*RUN)
    (whole,) = world.run_folders()
    size = max((whole / "checkpoints").glob("step*.ckpt")).stat().st_size
    assert (whole / "metrics.csv").stat().st_size < size // 2

    world = make_world(tmp_path / "full", some_documents(DOCUMENTS))
    with subprocess.Popen(
        world.command(*RUN, "resume=auto"),
        cwd=world.root,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_until(process, lambda: logged(world) >= 8)  # type: ignore[arg-type]
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size // 2, size // 2))
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 2, output + errors
    assert output.count("could not be written (File too large)") == 2
    assert "3 saves failed in a row" in errors
    assert "Traceback" not in errors
    (folder,) = world.run_folders()
    assert not list((folder / "checkpoints").glob(".*"))
    assert len(rows(folder)) < len(rows(whole))

    done = world.run(*RUN, "resume=auto")
    assert f"resume=auto: {folder} goes on after step" in done.stdout
    assert_same_run(folder, whole)
