"""What the host offers and what reading will take of it, said before a run starts.

Open files, shared memory and memory of the host run out late and with messages that name none of
them, so a run prints them once, and warns while it is cheap.
"""

from __future__ import annotations

import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

_FEW_FILES = 256
_MEMORY_SHARE = 0.5
_TOKENS_PER_S = 10_000
_SHARED_MEMORY = Path("/dev/shm")
_CGROUPS = (  # limit and statistics of version 2, then of version 1
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.stat"), "anon"),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.stat"),
        "rss",
    ),
)


@dataclass(frozen=True)
class Host:
    """Limits of this process and its machine; None: the system does not say."""

    open_files: int | None
    """``ulimit -n``; None also where there is no limit."""
    available_bytes: int | None
    """Memory that can still be taken: of the machine, or of the container where that is less."""
    shared_bytes: int | None
    """Size of ``/dev/shm``, over which ranks of one host exchange gradients."""


def read_host() -> Host:
    """Ask the system."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    known = [
        size for size in (_machine_memory(), *(_container_memory(*c) for c in _CGROUPS)) if size
    ]
    return Host(
        open_files=None if soft == resource.RLIM_INFINITY else soft,
        available_bytes=min(known, default=None),
        shared_bytes=shutil.disk_usage(_SHARED_MEMORY).total if _SHARED_MEMORY.is_dir() else None,
    )


def resource_lines(
    bytes_per_row: int,
    max_seq_len: int,
    accumulate: int,
    prefetch_windows: int,
    num_workers: int,
    *,
    ranks_on_host: int = 1,
    host: Host | None = None,
) -> list[str]:
    """Two lines about host and reading, and a warning for each thing that is scarce.

    Args:
        bytes_per_row: of the states of a token.
        max_seq_len: rows of a pack.
        accumulate: packs of a rank in an optimizer step.
        prefetch_windows: optimizer steps read ahead.
        num_workers: reader threads of a rank.
        ranks_on_host: they share its memory.
        host: None: asked for.
    """
    host = host or read_host()
    packs = (prefetch_windows + 1) * accumulate
    held = packs * max_seq_len * bytes_per_row
    files = "unlimited" if host.open_files is None else f"{host.open_files:,}"
    lines = [
        f"host: ulimit -n {files}, memory available "
        f"{_size(host.available_bytes)}, /dev/shm {_size(host.shared_bytes)}",
        f"reading: {bytes_per_row:,} bytes per token, so {_TOKENS_PER_S:,} tokens/s need "
        f"{_TOKENS_PER_S * bytes_per_row / 1e9:.3g} GB/s; {num_workers} reader threads hold up to "
        f"{packs} packs of {max_seq_len:,} rows, {_size(held)} per rank",
    ]
    if host.available_bytes is not None and held * ranks_on_host > (
        _MEMORY_SHARE * host.available_bytes
    ):
        lines.append(
            f"warning: packs read ahead take {_size(held * ranks_on_host)} ({ranks_on_host} "
            f"rank(s) of this host), found {_size(host.available_bytes)} of memory available, "
            f"expected at most {_MEMORY_SHARE:.0%} of it to be taken: lower data.prefetch_windows "
            f"(it is {prefetch_windows}), max_seq_len or tokens_per_step."
        )
    if host.open_files is not None and host.open_files < _FEW_FILES:
        lines.append(
            f"warning: found ulimit -n {host.open_files}, expected at least {_FEW_FILES}: a long "
            "run may end with 'Too many open files'. Say ulimit -n 4096 before it starts."
        )
    return lines


def _machine_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kib = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return kib[0] * 1024 if kib else None


def _container_memory(limit: Path, statistics: Path, used: str) -> int | None:
    """Limit of the container less what its processes hold; files that are cached can be dropped."""
    try:
        allowed = limit.read_text(encoding="ascii").strip()
        counts = dict(
            line.split(maxsplit=1) for line in statistics.read_text(encoding="ascii").splitlines()
        )
    except (OSError, ValueError):
        return None
    return max(int(allowed) - int(counts.get(used, 0)), 1) if allowed.isdecimal() else None


def _size(num_bytes: int | None) -> str:
    """In powers of ten, and in powers of two as operating systems say it."""
    if num_bytes is None:
        return "unknown"
    if num_bytes < 1e9:
        return f"{num_bytes / 1e6:,.1f} MB"
    return f"{num_bytes / 1e9:,.1f} GB ({num_bytes / 2**30:,.1f} GiB)"
