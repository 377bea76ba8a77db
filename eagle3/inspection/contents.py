"""What the index alone says about a directory; no data file is opened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from eagle3.data.hashing import sample_id
from eagle3.data.index import DocumentIndex, validation_documents
from eagle3.data.masks import Runs
from eagle3.inspection.facts import (
    ContentFacts,
    DuplicateFacts,
    LengthBin,
    LengthFacts,
    Named,
    SourceFacts,
    SupervisionFacts,
    ValidationFacts,
)
from eagle3.names import TrainOn

_NAMED = 5
_SHARE_BINS = 20

Labels = tuple[Sequence[str], NDArray[np.int64]]
"""Source labels, and the place among them of every document."""


def content_facts(
    index: DocumentIndex, labels: Labels, train_on: TrainOn, val_ratio: float
) -> ContentFacts:
    """Sum up ``index``, supervision under ``train_on``."""
    runs = index.runs.train_on(train_on, index.lengths)
    return ContentFacts(
        documents=len(index),
        tokens=int(index.lengths.sum()),
        too_short=index.too_short,
        lengths=_length_facts(index.lengths),
        supervision=_supervision_facts(index, runs, train_on),
        duplicates=_duplicate_facts(index),
        sources=tuple(_source_facts(index, labels, runs.totals())),
        validation=_validation_facts(index, val_ratio),
    )


def document_name(index: DocumentIndex, document: int) -> str:
    """``data_17.pt (sample 0123456789abcdef)``."""
    identity = sample_id(int(index.sample_hash[document]))
    return f"{index.file_name(document)} (sample {identity})"


def _named(index: DocumentIndex, chosen: NDArray[np.bool_]) -> Named:
    places = np.flatnonzero(chosen)
    return Named(len(places), tuple(document_name(index, int(d)) for d in places[:_NAMED]))


def _length_facts(lengths: NDArray[np.int64]) -> LengthFacts:
    p10, p50, p90, p99 = np.percentile(lengths, [10, 50, 90, 99]).tolist()
    return LengthFacts(
        shortest=int(lengths.min()),
        mean=float(lengths.mean()),
        p10=p10,
        p50=p50,
        p90=p90,
        p99=p99,
        longest=int(lengths.max()),
        histogram=tuple(_length_bins(lengths)),
    )


def _length_bins(lengths: NDArray[np.int64]) -> Iterator[LengthBin]:
    """Two bins from one power of two to the next, from the shortest document to the longest."""
    powers = range(1, int(lengths.max()).bit_length() + 1)
    edges = sorted({edge for p in powers for edge in (2**p, 3 * 2 ** (p - 1))})
    place = np.searchsorted(edges, lengths, side="right")
    documents = np.bincount(place, minlength=len(edges) + 1)
    tokens = np.bincount(place, weights=lengths, minlength=len(edges) + 1)
    filled = np.flatnonzero(documents)
    for k in range(int(filled[0]), int(filled[-1]) + 1):
        yield LengthBin(edges[k - 1], edges[k], int(documents[k]), int(tokens[k]))


def _supervision_facts(index: DocumentIndex, runs: Runs, train_on: TrainOn) -> SupervisionFacts:
    supervised, lengths = runs.totals(), index.lengths
    shares = supervised / lengths
    return SupervisionFacts(
        train_on=str(train_on),
        tokens=int(supervised.sum()),
        share=float(supervised.sum() / lengths.sum()),
        empty=_named(index, supervised == 0),
        full=_named(index, supervised == lengths),
        share_histogram=tuple(np.histogram(shares, _SHARE_BINS, (0, 1))[0].tolist()),
    )


def _duplicate_facts(index: DocumentIndex) -> DuplicateFacts:
    copies = np.ones(len(index), np.bool_)
    copies[np.unique(index.sample_hash, return_index=True)[1]] = False
    _, siblings = np.unique(index.prompt_hash[~copies], return_counts=True)
    several = siblings > 1
    return DuplicateFacts(
        copies=_named(index, copies),
        prompts=len(siblings),
        prompts_with_siblings=int(several.sum()),
        sibling_documents=int(siblings[several].sum()),
    )


def _source_facts(
    index: DocumentIndex, labels: Labels, supervised: NDArray[np.int64]
) -> Iterator[SourceFacts]:
    names, place = labels
    documents = np.bincount(place, minlength=len(names))
    tokens = np.bincount(place, weights=index.lengths, minlength=len(names))
    learned = np.bincount(place, weights=supervised, minlength=len(names))
    for k in np.argsort(-tokens, kind="stable").tolist():
        yield SourceFacts(names[k], int(documents[k]), int(tokens[k]), int(learned[k]))


def _validation_facts(index: DocumentIndex, val_ratio: float) -> ValidationFacts:
    held_out = validation_documents(index.prompt_hash, val_ratio)
    return ValidationFacts(
        val_ratio=val_ratio,
        documents=int(held_out.sum()),
        document_share=float(held_out.mean()),
        token_share=float(index.lengths[held_out].sum() / index.lengths.sum()),
    )
