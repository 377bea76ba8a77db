"""What is captured: token ids, what of them is supervised, and where they come from."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from eagle3.conversations.masking import Span
from eagle3.conversations.messages import Conversation
from eagle3.data.hashing import hash_document
from eagle3.data.masks import Runs, apply_train_on, supervised_runs
from eagle3.data.native_index import Documents
from eagle3.names import TrainOn
from eagle3.tokens import TokenSequence

_Items = TypeVar("_Items", bound=tuple[object, ...])
_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_LABEL = 64


@dataclass(frozen=True)
class Document:
    """One document of n tokens."""

    ids: tuple[int, ...]
    spans: tuple[Span, ...]
    """Bounds ``[start, stop)`` of the supervised tokens, ascending."""
    source: str = ""
    place: str = ""
    """File and line, for messages."""

    @property
    def loss_mask(self) -> tuple[int, ...]:
        """1 on supervised tokens."""
        mask = [0] * len(self.ids)
        for start, stop in self.spans:
            mask[start:stop] = [1] * (stop - start)
        return tuple(mask)


def of_sequence(sequence: TokenSequence, place: str) -> Document:
    """A document of a token file."""
    span = (sequence.prompt_length, len(sequence.ids))
    spans = (span,) if span[0] < span[1] else ()
    return Document(sequence.ids, spans, label(sequence.kind), place)


def restricted(document: Document, train_on: TrainOn) -> Document:
    """With the supervision that ``train_on`` asks for."""
    mask = apply_train_on(torch.tensor(document.loss_mask, dtype=torch.bool), train_on)
    spans = tuple((int(a), int(b)) for a, b in supervised_runs(mask.numpy()))
    return Document(document.ids, spans, document.source, document.place)


def part_of(items: _Items, part: int, parts: int) -> _Items:
    """Block ``part`` of ``parts``; the blocks are consecutive and equal in size to within one, so
    that the parts one after another are the whole in its order."""
    first, stop = part * len(items) // parts, (part + 1) * len(items) // parts
    return items[first:stop]  # type: ignore[return-value]


def label(source: str) -> str:
    """``source`` as a name under which metrics can be shown: ``org/name`` becomes ``org_name``."""
    return _UNFIT.sub("_", source).lstrip("._-")[:_LONGEST_LABEL]


def native_documents(documents: Sequence[Document]) -> Documents:
    """The documents as a native directory lists them."""
    arrays = [np.array(document.ids, np.int64) for document in documents]
    runs = [np.array(document.spans, np.int64).reshape(-1, 2) for document in documents]
    hashes = [hash_document(ids, own) for ids, own in zip(arrays, runs, strict=True)]
    sources = sorted({document.source for document in documents})
    place = {source: number for number, source in enumerate(sources)}
    return Documents(
        lengths=np.array([len(ids) for ids in arrays], np.int64),
        runs=Runs.stack(runs),
        sample_hash=np.array([sample for sample, _ in hashes], np.uint64),
        prompt_hash=np.array([prompt for _, prompt in hashes], np.uint64),
        sources=tuple(sources),
        source=np.array([place[document.source] for document in documents], np.int64),
    )


def input_hash(items: Sequence[Conversation] | Sequence[Document]) -> str:
    """24 hexadecimal digits for what a capture was asked for, wherever the file lies."""
    digest = hashlib.blake2b(digest_size=12)
    for item in items:
        if isinstance(item, Document):
            content: object = [item.ids, item.spans, item.source]
        else:
            content = [[*map(dict, item.messages)], [*map(dict, item.tools)], item.source]
        digest.update(json.dumps(content, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()
