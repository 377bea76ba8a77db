"""What the stored states of some documents look like: NaN, zeros, sizes, layers that are alike.

Documents are read in threads and in chunks, so that memory stays small however long they are.
Unlike the loader's reader this one passes NaN on, because here they are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle3.data.index import DocumentIndex
from eagle3.data.masks import Runs
from eagle3.data.reading import StateReader
from eagle3.data.store import Store
from eagle3.errors import DataError
from eagle3.inspection.facts import BadFile, LayerFacts, PairFacts, StateFacts

_CHUNK_VALUES = 16_000_000
"""Values of a chunk, 64 MB in float32."""


@dataclass(frozen=True, eq=False)
class ProbeRows:
    """Some tokens whose successor is supervised, with all their states; R of them."""

    states: Tensor
    """[R, K + 1, H] in the stored dtype, the last state last; finite."""
    next_ids: Tensor
    """int64 [R], the data's next token."""


@dataclass(frozen=True, eq=False)
class SampledDocument:
    """What one document contributes; n tokens, L = K + 1 states, P pairs of them."""

    document: int
    input_ids: Tensor
    """int64 [n]"""
    bad: Tensor
    """bool [n, L], NaN or inf in the state."""
    zero: Tensor
    """bool [n, L], nothing but zeros."""
    rms: Tensor
    """float32 [n, L]"""
    distance: Tensor
    """float32 [n, P], |a - b| / max(|a|, |b|)."""
    probe: ProbeRows


@dataclass(frozen=True, eq=False)
class Sampling:
    """Where the sampled documents come from, and how many tokens of each are probed."""

    store: Store
    index: DocumentIndex
    runs: Runs
    """Supervised tokens."""
    probe_rows: int
    """At most so many of a document."""

    @cached_property
    def reader(self) -> StateReader:
        """Of their token ids."""
        return StateReader(self.store, self.index)


def spread(count: int, wanted: int) -> NDArray[np.int64]:
    """``wanted`` of ``count`` places, evenly spaced, both ends included; all where there are fewer.

    Returns:
        int64, ascending and distinct.
    """
    return np.unique(np.linspace(0, count - 1, min(count, wanted)).round().astype(np.int64))


def sample_documents(
    sampling: Sampling,
    documents: Sequence[int],
    num_workers: int,
    finished: Callable[[int], None],
) -> tuple[list[SampledDocument], tuple[BadFile, ...]]:
    """Read ``documents``; ``finished`` is told the tokens of each.

    Returns:
        The documents, in order, and those that cannot be read.
    """
    read = partial(_sample_or_reason, sampling)
    found, unreadable = [], []
    with ThreadPoolExecutor(num_workers, thread_name_prefix="eagle3-inspect") as pool:
        for document, result in zip(documents, pool.map(read, documents), strict=True):
            finished(int(sampling.index.lengths[document]))
            if isinstance(result, SampledDocument):
                found.append(result)
            else:
                path = sampling.store.directory / sampling.index.file_name(document)
                unreadable.append(BadFile(str(path), str(result)))
    return found, tuple(unreadable)


def state_facts(
    sampled: Sequence[SampledDocument],
    unreadable: tuple[BadFile, ...],
    names: Sequence[str],
    bytes_per_token: int,
) -> StateFacts:
    """Sum up; ``names`` are those of the L states."""
    tokens = sum(len(document.input_ids) for document in sampled)
    return StateFacts(
        documents=len(sampled),
        tokens=tokens,
        read_bytes=tokens * bytes_per_token,
        layers=tuple(_layer_facts(sampled, k, name) for k, name in enumerate(names)),
        pairs=tuple(
            PairFacts(names[a], names[b], _median([d.distance[:, p] for d in sampled]))
            for p, (a, b) in enumerate(combinations(range(len(names)), 2))
        ),
        unreadable=unreadable,
    )


def read_states(store: Store, index: DocumentIndex, document: int, start: int, stop: int) -> Tensor:
    """All states of tokens ``[start, stop)``, whatever their values.

    Returns:
        [stop - start, K + 1, H] in the stored dtype.

    Raises:
        DataError: the file cannot be read or is too short.
    """
    layout, itemsize = store.layout, index.dtype.itemsize
    path = store.directory / index.file_name(document)
    states = torch.empty(stop - start, layout.width, dtype=index.dtype)
    for number, plane in enumerate(store.planes):
        offset = int(index.state_offsets[document, number]) + start * plane.width * itemsize
        wanted = (stop - start) * plane.width * itemsize
        try:
            content = np.fromfile(path, np.uint8, wanted, offset=offset)
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read ({error}). Check the disk and the file."
            ) from error
        if len(content) < wanted:
            raise DataError(
                f"{path}: found its end at byte {offset + len(content):,}, expected "
                f"{offset + wanted:,} bytes or more: it was cut after it was indexed. Copy or "
                "capture it again."
            )
        rows = torch.from_numpy(content).view(index.dtype).view(stop - start, plane.width)
        states[:, plane.first : plane.stop] = rows
    return states.view(stop - start, layout.num_aux_layers + 1, layout.hidden_size)


def _sample_or_reason(sampling: Sampling, document: int) -> SampledDocument | DataError:
    try:
        return _sample(sampling, document)
    except DataError as error:
        return error


def _sample(sampling: Sampling, document: int) -> SampledDocument:
    index, store = sampling.index, sampling.store
    ids = sampling.reader.input_ids(document)
    mask = sampling.runs.mask(document, len(ids))
    candidates = np.flatnonzero(mask[1:])
    positions = torch.from_numpy(candidates[spread(len(candidates), sampling.probe_rows)])
    chunk = max(_CHUNK_VALUES // store.layout.width, 1)
    looks, picked = [], []
    for start in range(0, len(ids), chunk):
        stop = min(start + chunk, len(ids))
        states = read_states(store, index, document, start, stop)
        looks.append(_look(states.float()))
        inside = positions[(positions >= start) & (positions < stop)] - start
        picked.append(states[inside])
    bad, zero, rms, distance = (torch.cat(parts) for parts in zip(*looks, strict=True))
    usable = ~bad[positions].any(dim=1)
    probe = ProbeRows(torch.cat(picked)[usable], ids[positions + 1][usable])
    return SampledDocument(document, ids, bad, zero, rms, distance, probe)


def _look(states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bad, zero, RMS and pair distances of float32 states [m, L, H]."""
    largest = states.abs().amax(dim=-1)
    norms = torch.linalg.vector_norm(states, dim=-1)
    distances = [
        torch.linalg.vector_norm(states[:, a] - states[:, b], dim=-1)
        / torch.maximum(norms[:, a], norms[:, b]).clamp(min=1e-30)
        for a, b in combinations(range(states.shape[1]), 2)
    ]
    return (
        ~torch.isfinite(largest),
        largest == 0,
        norms / states.shape[-1] ** 0.5,
        torch.stack(distances, dim=1),
    )


def _layer_facts(sampled: Sequence[SampledDocument], layer: int, name: str) -> LayerFacts:
    later = [document.rms[1:, layer] for document in sampled]
    return LayerFacts(
        name=name,
        bad_rows=sum(int(document.bad[:, layer].sum()) for document in sampled),
        zero_rows=sum(int(document.zero[:, layer].sum()) for document in sampled),
        rms_median=_median(later),
        rms_p99=_quantile(later, 0.99),
        rms_first_token=_median([document.rms[:1, layer] for document in sampled]),
    )


def _median(parts: Sequence[Tensor]) -> float:
    return _quantile(parts, 0.5)


def _quantile(parts: Sequence[Tensor], share: float) -> float:
    """Of the finite values; 0 where there are none."""
    values = np.concatenate([np.zeros(0, np.float32), *(part.numpy() for part in parts)])
    finite = values[np.isfinite(values)]
    return float(np.quantile(finite, share)) if len(finite) else 0.0
