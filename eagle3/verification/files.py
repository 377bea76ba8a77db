"""Directories with a file per document: structure, and the checksums that the format has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle3.byte_progress import ByteProgress
from eagle3.data.hashing import sample_id
from eagle3.data.scan import Part, scan
from eagle3.data.speculators_v1 import SpeculatorsV1
from eagle3.data.store import DocumentRecord, Store
from eagle3.data.torch_zip import TorchZip
from eagle3.data.zip_structure import check_structure
from eagle3.errors import DataError
from eagle3.verification.result import Choose, Damage, Result

_MEND = "Copy the file again from its origin, or capture the sample again."


@dataclass(frozen=True)
class _FileResult:
    damages: list[Damage]
    dtype: str | None
    """Of the states; None: the file is not readable."""
    has_checksums: bool


def check_files(store: Store, choose: Choose, num_workers: int, progress: ByteProgress) -> Result:
    """Read all files, or the chosen ones; each thread one at a time."""
    files = [store.files[place] for place in choose(len(store.files)).tolist()]
    progress.total = sum(_size(store.directory / file) for file in files)
    with ThreadPoolExecutor(num_workers, "eagle3-verify") as pool:
        results = list(pool.map(lambda file: _check(store, file, progress), files))
    damages = [damage for result in results for damage in result.damages]
    damages += _other_dtypes(store, files, results)
    checks, unchecked = ["structure", "token ids", "finite states"], []
    if isinstance(store, SpeculatorsV1):
        checks[0] = "structure (all of the zip that a reader uses; not dates, versions, padding)"
    without = sum(not result.has_checksums for result in results)
    if without < len(results):
        checks.append("CRC-32 of every record")
    if without:
        unchecked.append(f"bytes of {without:,} files, which have no checksums")
    return Result(
        num_samples=len(store.files),
        num_checked=len(files),
        num_bytes=progress.done,
        checks=tuple(checks),
        unchecked=tuple(unchecked),
        damages=tuple(damages),
    )


def _check(store: Store, file: str, progress: ByteProgress) -> _FileResult:
    path = store.directory / file
    damages, records = [], list[DocumentRecord]()
    try:
        records += store.probe(file)
    except DataError as error:
        damages.append(Damage(str(path), str(error)))
    states = _merge(_states(store, records))
    dtype = records[0].dtype if records else None
    sample = sample_id(records[0].sample_hash) if len(records) == 1 else None
    names, parts = ["states"] * len(states), _plain(states, dtype)
    try:
        if isinstance(store, SpeculatorsV1):
            names, parts = _records(path, states, dtype)
        faults = scan(path, parts, count=progress.add)
    except DataError as error:
        return _FileResult(damages or [Damage(str(path), str(error))], dtype, False)
    except OSError as error:
        what = f"cannot be read ({error}). {_MEND}"
        return _FileResult(damages or [Damage(str(path), what)], dtype, False)
    for name, part, fault in zip(names, parts, faults, strict=True):
        if fault is not None:
            what = f"{name}: {fault}. {_MEND}"
            damages.append(Damage(str(path), what, sample, part.start, part.stop))
    return _FileResult(damages, dtype, any(part.crc32 is not None for part in parts))


def _states(store: Store, records: Sequence[DocumentRecord]) -> Iterator[tuple[int, int]]:
    """Bytes of all states of a file."""
    for record in records:
        itemsize = getattr(torch, record.dtype).itemsize
        for plane, offset in zip(store.planes, record.state_offsets, strict=True):
            yield offset, offset + record.length * plane.width * itemsize


def _merge(ranges: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending and disjoint; tensors may be views of one storage."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged


def _plain(states: Sequence[tuple[int, int]], dtype: str | None) -> list[Part]:
    return [Part(*place, None, (place,), getattr(torch, str(dtype))) for place in states]


def _records(
    path: Path, states: Sequence[tuple[int, int]], dtype: str | None
) -> tuple[list[str], list[Part]]:
    """Names and places of the records of a ``torch.save`` file, in the order of the file."""
    names, parts = [], []
    with TorchZip(path) as archive:
        check_structure(archive)
        for entry in sorted(archive.entries.values(), key=lambda entry: entry.header):
            start = archive.start(entry)
            own = tuple(
                (max(first, start), min(stop, start + entry.size))
                for first, stop in states
                if first < start + entry.size and stop > start
            )
            names.append(f"record {entry.name}")
            crc32 = entry.crc32 or None  # 0: torch.save was told not to compute it
            kind = torch.bfloat16 if dtype is None else getattr(torch, dtype)
            parts.append(Part(start, start + entry.size, crc32, own, kind))
    return names, parts


def _other_dtypes(
    store: Store, files: Sequence[str], results: Sequence[_FileResult]
) -> Iterator[Damage]:
    """One dtype in the whole directory, the one of its first readable file."""
    known = [(file, result.dtype) for file, result in zip(files, results, strict=True)]
    readable = [(file, dtype) for file, dtype in known if dtype is not None]
    for file, dtype in readable:
        if dtype != readable[0][1]:
            what = f"found {dtype}, expected {readable[0][1]} as in {readable[0][0]}. {_MEND}"
            yield Damage(str(store.directory / file), what)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
