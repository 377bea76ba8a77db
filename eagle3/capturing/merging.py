"""Several captures of parts into one directory, without computing or copying states.

The parts of a capture are consecutive blocks of its input. Their shards keep their bytes and get
new numbers; where the disk allows it they are linked, not copied. The manifest is written last.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from eagle3.capturing.config import CaptureRunConfig
from eagle3.capturing.plan import required
from eagle3.capturing.record import RECORD_NAME, read_record
from eagle3.data.disk import publish, write_error, write_whole
from eagle3.data.masks import Runs
from eagle3.data.native import is_native
from eagle3.data.native_index import Documents, NativeIndex, fingerprint, read_index
from eagle3.data.native_manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    Manifest,
    digest,
    manifest_text,
    read_manifest,
)
from eagle3.errors import ConfigError, DataError

_MERGING = ".merging"


def merge(settings: CaptureRunConfig, log: Callable[[str], None]) -> Manifest:
    """Join the directories ``settings.merge`` into ``settings.out``.

    Raises:
        ConfigError: no parts are named.
        DataError: parts of different captures, a part that is missing or there twice, or ``out``
            is not empty.
    """
    out = Path(required(settings.out, "out", "a new directory for all parts"))
    if not settings.merge:
        raise ConfigError("merge=[..] is empty: give the directories of all parts")
    parts = _in_order([Path(directory) for directory in settings.merge])
    if out.exists() and any(path.name != _MERGING for path in out.iterdir()):
        raise DataError(f"{out}: found files in it, expected a new or empty directory")
    manifests = [read_manifest(part) for part in parts]
    _check_same_states(parts, manifests)
    indexes = [read_index(p, m) for p, m in zip(parts, manifests, strict=True)]
    merged = _manifest(manifests, indexes)
    work = out / _MERGING
    try:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        _bring(parts, manifests, work, log)
        index = _joined(indexes).to_bytes()
        manifest = replace(merged, index_blake2b=digest(index))
        record = _record([read_record(part) for part in parts])
        write_whole(work / RECORD_NAME, record)
        write_whole(work / INDEX_NAME, index)
        write_whole(work / MANIFEST_NAME, manifest_text(manifest).encode())
        names = sorted(path.name for path in work.iterdir() if path.name != MANIFEST_NAME)
        for name in (*names, MANIFEST_NAME):  # the manifest last: it says that all is there
            publish(work / name, out / name)
        work.rmdir()
    except OSError as error:
        raise write_error(out, error, sum(s.bytes for m in manifests for s in m.shards)) from error
    return manifest


def _in_order(parts: Sequence[Path]) -> list[Path]:
    """The parts as their input has them, all and each once."""
    for part in parts:
        if not is_native(part):
            raise DataError(
                f"{part}: found no manifest.json, expected a complete native capture: start its "
                "capture again, it goes on where it stopped"
            )
    records = [(part, read_record(part)) for part in parts]
    whole = {str(record.get("whole")) for _, record in records}
    if len(whole) > 1:
        lines = "\n".join(
            f"  {part}: {r.get('input')}, capture {r.get('whole')}" for part, r in records
        )
        raise DataError(f"found parts of different captures, expected of one:\n{lines}")
    numbers = sorted((int(record["part"]), str(part)) for part, record in records)
    count = int(records[0][1]["parts"])
    if [number for number, _ in numbers] != list(range(count)):
        raise DataError(
            f"found the parts {[number for number, _ in numbers]}, expected 0 to {count - 1}, each "
            "once: name the directory of every part"
        )
    return [Path(part) for _, part in numbers]


def _check_same_states(parts: Sequence[Path], manifests: Sequence[Manifest]) -> None:
    first = manifests[0]
    for part, manifest in zip(parts, manifests, strict=True):
        if (manifest.states, manifest.verifier) != (first.states, first.verifier):
            raise DataError(
                f"{part}: found states of {manifest.verifier} as {manifest.states}, expected those "
                f"of {parts[0]}: {first.verifier}, {first.states}. Capture that part again"
            )


def _bring(
    parts: Sequence[Path], manifests: Sequence[Manifest], work: Path, log: Callable[[str], None]
) -> None:
    number = 0
    for part, manifest in zip(parts, manifests, strict=True):
        log(f"{part}: {manifest.num_samples:,} documents in {len(manifest.shards)} shards")
        for shard in manifest.shards:
            target = work / _name(number)
            try:
                os.link(part / shard.file, target)
            except OSError:  # another disk, or one without links
                shutil.copyfile(part / shard.file, target)
            number += 1


def _manifest(manifests: Sequence[Manifest], indexes: Sequence[NativeIndex]) -> Manifest:
    shards = [shard for manifest in manifests for shard in manifest.shards]
    hashes = np.concatenate([index.documents.sample_hash for index in indexes])
    return replace(
        manifests[0],
        num_samples=sum(manifest.num_samples for manifest in manifests),
        num_tokens=sum(manifest.num_tokens for manifest in manifests),
        num_supervised_tokens=sum(manifest.num_supervised_tokens for manifest in manifests),
        fingerprint=fingerprint(hashes),
        shards=tuple(replace(shard, file=_name(n)) for n, shard in enumerate(shards)),
    )


def _joined(indexes: Sequence[NativeIndex]) -> NativeIndex:
    documents = [index.documents for index in indexes]
    sources = sorted({source for each in documents for source in each.sources})
    place = {source: number for number, source in enumerate(sources)}
    shards_before = np.cumsum([0, *(int(index.shard.max()) + 1 for index in indexes)])
    source = [
        np.array([place[label] for label in each.sources], np.int64)[each.source]
        for each in documents
    ]
    joined = Documents(
        lengths=np.concatenate([each.lengths for each in documents]),
        runs=Runs.concatenate([each.runs for each in documents]),
        sample_hash=np.concatenate([each.sample_hash for each in documents]),
        prompt_hash=np.concatenate([each.prompt_hash for each in documents]),
        sources=tuple(sources),
        source=np.concatenate(source),
    )
    shard = [i.shard + before for i, before in zip(indexes, shards_before[:-1], strict=True)]
    return NativeIndex(
        joined,
        np.concatenate(shard),
        np.concatenate([index.start for index in indexes]),
        np.concatenate([index.crc32 for index in indexes]),
    )


def _record(records: Sequence[dict[str, Any]]) -> bytes:
    counts = ("documents", "tokens", "supervised_tokens")
    joined = {
        **records[0],
        **{name: sum(int(record[name]) for record in records) for name in counts},
        "failed": [line for record in records for line in record["failed"]],
        "part": 0,
        "parts": 1,
        "merged_parts": len(records),
    }
    return (json.dumps(joined, indent=2) + "\n").encode()


def _name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"
