"""A native directory against the checksums in its manifest and index."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from eagle3.byte_progress import ByteProgress
from eagle3.data.hashing import hash_ids, sample_id
from eagle3.data.native import NativeStore, check_shard_size
from eagle3.data.native_shard import TENSORS
from eagle3.data.scan import Fault, Part, scan
from eagle3.errors import DataError
from eagle3.verification.result import Choose, Damage, Result

_MEND = "Copy the shard again from its origin, or convert the directory again."
_CHECKS = ("manifest", "index", "sizes", "CRC-32 of samples", "token ids", "finite states")


@dataclass(frozen=True)
class _Shard:
    """One shard, and the samples of it to look at."""

    store: NativeStore
    number: int
    samples: NDArray[np.int64]
    """Numbers into the index; none where the index cannot be read."""
    is_whole: bool
    """Every byte is read, for the checksum of the file."""

    @property
    def path(self) -> Path:
        return self.store.directory / self.store.files[self.number]

    @property
    def parts(self) -> list[Part]:
        """Bytes of the samples, tensor by tensor."""
        layout = self.store.manifest.shard_layout(self.number)
        dtype = getattr(torch, layout.dtype)
        parts = []
        for tensor in range(len(TENSORS)):
            for sample in self.samples.tolist():
                index = self.store.index
                start, length = int(index.start[sample]), int(index.documents.lengths[sample])
                place = layout.ranges(start, length)[tensor]
                states = (place,) if tensor < 2 else ()
                parts.append(Part(*place, int(index.crc32[sample, tensor]), states, dtype))
        return parts

    @property
    def num_bytes(self) -> int:
        """That will be read."""
        if self.is_whole:
            return self.store.manifest.shards[self.number].bytes
        return sum(part.stop - part.start for part in self.parts)

    def name(self, sample: int) -> str:
        """The id of a sample."""
        return sample_id(int(self.store.index.documents.sample_hash[sample]))


def check_native(
    store: NativeStore, choose: Choose, num_workers: int, progress: ByteProgress
) -> Result:
    """Read the shards, all of them or the chosen samples; each thread a shard at a time."""
    damages: list[Damage] = []
    total = store.manifest.num_samples
    chosen = choose(total)
    is_whole = len(chosen) == total
    try:
        place_of = store.index.shard
    except DataError as error:
        damages.append(Damage(str(store.directory), str(error)))
        place_of, chosen = np.zeros(0, np.int64), np.zeros(0, np.int64)
        is_whole = True
    shards = [
        _Shard(store, number, chosen[place_of[chosen] == number], is_whole)
        for number in range(len(store.files))
    ]
    progress.total = sum(shard.num_bytes for shard in shards)
    with ThreadPoolExecutor(num_workers, "eagle3-verify") as pool:
        for found in pool.map(lambda shard: _check(shard, progress), shards):
            damages += found
    whole_file = "blake2b of shards"
    return Result(
        num_samples=total,
        num_checked=len(chosen),
        num_bytes=progress.done,
        checks=(*_CHECKS, whole_file) if is_whole else _CHECKS,
        unchecked=() if is_whole else (f"{whole_file} (only samples were read)",),
        damages=tuple(damages),
    )


def _check(shard: _Shard, progress: ByteProgress) -> list[Damage]:
    manifest, path = shard.store.manifest, str(shard.path)
    damages = []
    try:
        check_shard_size(shard.store.directory, manifest, shard.number)
    except DataError as error:
        damages.append(Damage(path, str(error)))
        if not shard.path.is_file():
            return damages
    hashed = hashlib.blake2b(digest_size=32)
    parts = shard.parts
    try:
        damages += _check_header(shard)
        digest = hashed if shard.is_whole else None
        faults = scan(shard.path, parts, digest=digest, count=progress.add)
        damages += _damaged_parts(shard, parts, faults)
        damages += _wrong_ids(shard, faults)
    except OSError as error:
        return [*damages, Damage(path, f"cannot be read ({error}). {_MEND}")]
    stated = manifest.shards[shard.number].blake2b
    if shard.is_whole and not damages and hashed.hexdigest() != stated:
        what = (
            f"the file has the blake2b {hashed.hexdigest()}, expected {stated} as "
            f"in the manifest, though no sample of it is known to be damaged. {_MEND}"
        )
        damages.append(Damage(path, what))
    return damages


def _check_header(shard: _Shard) -> list[Damage]:
    expected = shard.store.manifest.shard_layout(shard.number).header
    with shard.path.open("rb") as file:
        found = file.read(len(expected))
    if found == expected:
        return []
    what = f"found another header than the sizes in the manifest ask for. {_MEND}"
    return [Damage(str(shard.path), what, first_byte=0, stop_byte=len(expected))]


def _damaged_parts(shard: _Shard, parts: list[Part], faults: list[Fault | None]) -> list[Damage]:
    """Ordered by sample, so that all that is wrong with one stands together."""
    damages = []
    for place, sample in enumerate(shard.samples.tolist()):
        for tensor, name in enumerate(TENSORS):
            number = tensor * len(shard.samples) + place
            fault, part = faults[number], parts[number]
            if fault is not None:
                what = f"{name}: {fault}. {_MEND}"
                found = Damage(str(shard.path), what, shard.name(sample), part.start, part.stop)
                damages.append(found)
    return damages


def _wrong_ids(shard: _Shard, faults: list[Fault | None]) -> list[Damage]:
    """Undamaged ids that are not tokens of the verifier, or not those of the index."""
    if not len(shard.samples):
        return []
    documents, index = shard.store.index.documents, shard.store.index
    layout = shard.store.manifest.shard_layout(shard.number)
    damages = []
    for place, sample in enumerate(shard.samples.tolist()):
        if faults[TENSORS.index("input_ids") * len(shard.samples) + place] is not None:
            continue
        length = int(documents.lengths[sample])
        first, stop = layout.ranges(int(index.start[sample]), length)[TENSORS.index("input_ids")]
        ids = np.fromfile(shard.path, "<i8", length, offset=first)
        low, high = int(ids.min(initial=0)), int(ids.max(initial=0))
        if low < 0 or high >= layout.states.vocab_size:
            what = f"token ids {low} to {high}, expected 0 to {layout.states.vocab_size - 1}"
        elif hash_ids(ids) != int(documents.sample_hash[sample]):
            what = "other token ids than the index says"
        else:
            continue
        what = f"input_ids: {what}. {_MEND}"
        damages.append(Damage(str(shard.path), what, shard.name(sample), first, stop))
    return damages
