"""What a host offers, and warnings where reading would take too much of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from eagle3.resources import Host, _container_memory, read_host, resource_lines

ROOMY = Host(open_files=1024, available_bytes=64_000_000_000, shared_bytes=67_108_864)


def lines(host: Host, **changes: int) -> list[str]:
    sizes = {
        "bytes_per_row": 57_344,
        "max_seq_len": 4096,
        "accumulate": 2,
        "prefetch_windows": 2,
        "num_workers": 8,
    }
    return resource_lines(**(sizes | changes), host=host)  # type: ignore[arg-type]


def test_lines_hold_the_figures() -> None:
    host, reading = lines(ROOMY)
    assert "ulimit -n 1,024" in host
    assert "64.0 GB (59.6 GiB)" in host
    assert "/dev/shm 67.1 MB" in host
    assert "57,344 bytes per token" in reading
    assert "10,000 tokens/s need 0.573 GB/s" in reading
    assert "6 packs of 4,096 rows, 1.4 GB (1.3 GiB) per rank" in reading


@pytest.mark.parametrize(
    ("available", "ranks", "warns"),
    [(2_819_000_000, 1, False), (2_818_000_000, 1, True), (5_600_000_000, 2, True)],
    ids=["half", "less than half", "ranks share it"],
)
def test_prefetched_packs_may_take_half_of_the_memory(
    available: int, ranks: int, warns: bool
) -> None:
    """6 packs hold 1,409,286,144 bytes."""
    host = Host(1024, available, None)
    found = [line for line in lines(host, ranks_on_host=ranks) if line.startswith("warning")]
    assert len(found) == warns
    assert all("data.prefetch_windows" in line and "expected at most 50%" in line for line in found)


def test_few_open_files_warn_and_unknown_figures_do_not() -> None:
    assert "found ulimit -n 128" in lines(Host(128, None, None))[-1]
    host, _ = lines(Host(None, None, None))
    assert host == "host: ulimit -n unlimited, memory available unknown, /dev/shm unknown"


def test_limits_of_a_real_process_are_seen() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 4096));"
        "from eagle3.resources import resource_lines as lines;"
        "print(*lines(8, 8, 1, 1, 1), sep='|')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "ulimit -n 128," in done.stdout
    assert "warning: found ulimit -n 128" in done.stdout


def test_this_machine_answers() -> None:
    host = read_host()
    assert host.available_bytes is None or host.available_bytes > 1_000_000


@pytest.mark.parametrize(
    ("limit", "statistics", "expected"),
    [
        ("1000\n", "anon 300\nfile 650\n", 700),
        ("1000\n", "anon 3000\n", 1),
        ("max\n", "anon 300\n", None),
        (None, "anon 300\n", None),
    ],
    ids=["cached files do not count", "over", "no limit", "no container"],
)
def test_a_container_may_allow_less(
    tmp_path: Path, limit: str | None, statistics: str, expected: int | None
) -> None:
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.stat").write_text(statistics)
    found = _container_memory(tmp_path / "memory.max", tmp_path / "memory.stat", "anon")
    assert found == expected
