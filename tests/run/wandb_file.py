"""Read the file that W&B writes offline, to see what would be uploaded.

A log of records in blocks of 32 KiB: crc32 (4 bytes), length (2), kind (1), data; a long record
comes in parts of the kinds first, middle and last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from wandb.proto import wandb_internal_pb2

_BLOCK, _FILE_HEADER, _RECORD_HEADER = 32768, 7, 7
_FULL, _LAST = 1, 4


@dataclass
class OfflineRun:
    """What one offline run recorded."""

    id: str = ""
    group: str = ""
    job_type: str = ""
    exit_code: int | None = None
    history: list[dict[str, str]] = field(default_factory=list)
    """Values as JSON text, one dict per logged row."""
    alerts: list[tuple[str, str]] = field(default_factory=list)
    """Titles and texts."""


def read_offline_run(run_dir: Path) -> OfflineRun:
    """The one offline run below a run folder."""
    (path,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    run = OfflineRun()
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.id, run.group = record.run.run_id, record.run.run_group
            run.job_type = record.run.job_type
        elif kind == "history":
            items = record.history.item
            run.history.append({i.key or ".".join(i.nested_key): i.value_json for i in items})
        elif kind == "alert":
            run.alerts.append((record.alert.title, record.alert.text))
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
    return run


def _records(content: bytes) -> Iterator[bytes]:
    position, parts = _FILE_HEADER, b""
    while position + _RECORD_HEADER <= len(content):
        left = _BLOCK - position % _BLOCK
        if left < _RECORD_HEADER:
            position += left
            continue
        length = int.from_bytes(content[position + 4 : position + 6], "little")
        kind = content[position + 6]
        position += _RECORD_HEADER
        parts += content[position : position + length]
        position += length
        if kind in (_FULL, _LAST):
            yield parts
            parts = b""
