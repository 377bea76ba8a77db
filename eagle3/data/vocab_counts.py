"""How often each token is supervised: from token ids and masks alone, no state is read."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Bool, Int
from numpy.typing import NDArray
from torch import Tensor

from eagle3.data.layout import StateLayout

logger = logging.getLogger(__name__)
_CHUNK_DOCUMENTS = 64
_PROGRESS_S = 5.0


class TokenDocuments(Protocol):
    """Documents by number, such as :class:`eagle3.data.corpus.Corpus`."""

    @property
    def layout(self) -> StateLayout:
        """Its vocabulary size bounds the token ids."""

    def input_ids(self, document: int) -> Int[Tensor, " N"]:
        """int64, all token ids. Safe from several threads."""

    def loss_mask(self, document: int) -> Bool[Tensor, " N"]:
        """The supervised tokens."""


def token_frequencies(
    corpus: TokenDocuments, documents: Sequence[int] | NDArray[np.int64], num_workers: int
) -> Int[Tensor, " W"]:
    """Count the supervised tokens of ``documents`` in threads.

    Returns:
        int64 [W], W the verifier's vocabulary.

    Raises:
        DataError: the token ids of a document cannot be read, or are others than were indexed.
    """
    size = corpus.layout.vocab_size
    counts = np.zeros(size, np.int64)

    def count(chunk: Sequence[int]) -> NDArray[np.int64]:
        ids = [corpus.input_ids(d)[corpus.loss_mask(d)].numpy() for d in chunk]
        return np.bincount(np.concatenate(ids), minlength=size)

    numbers = [int(document) for document in documents]
    chunks = [numbers[i : i + _CHUNK_DOCUMENTS] for i in range(0, len(numbers), _CHUNK_DOCUMENTS)]
    pool = ThreadPoolExecutor(num_workers, thread_name_prefix="eagle3-count")
    try:
        for found in _reported(pool.map(count, chunks), len(numbers)):
            counts += found
    finally:
        pool.shutdown(cancel_futures=True)
    return torch.from_numpy(counts)


def _reported(results: Iterator[NDArray[np.int64]], documents: int) -> Iterator[NDArray[np.int64]]:
    """Pass results of chunks on, with a line every few seconds."""
    started = reported = time.monotonic()
    for number, result in enumerate(results, start=1):
        yield result
        now, done = time.monotonic(), min(number * _CHUNK_DOCUMENTS, documents)
        if now - reported > _PROGRESS_S and done < documents:
            reported = now
            left = int((now - started) * (documents - done) / done)
            logger.info(
                "counting response tokens: %s of %s documents (%d %%), %d:%02d left",
                f"{done:,}",
                f"{documents:,}",
                100 * done // documents,
                *divmod(left, 60),
            )
