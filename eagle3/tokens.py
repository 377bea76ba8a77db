"""Token files: one document a line, as a verifier wrote it.

A line of a ``.jsonl`` or ``.jsonl.gz`` file is ``{"ids": [...], "n": 41, "kind": "math"}``: all
token ids of the document, the number of prompt tokens in front, and optionally a source label.
Other keys are for people.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeVar

from eagle3.errors import DataError

_Item = TypeVar("_Item")


class SupervisedIds(Protocol):
    """What a capture has to know of a document of n tokens."""

    @property
    def ids(self) -> tuple[int, ...]:
        """All token ids."""
        ...

    @property
    def loss_mask(self) -> tuple[int, ...]:
        """1 on supervised tokens."""
        ...


@dataclass(frozen=True)
class TokenSequence:
    """One document of n tokens."""

    ids: tuple[int, ...]
    """All token ids, prompt first."""
    prompt_length: int
    """Tokens of the prompt; the rest is the verifier's response."""
    kind: str = ""
    """Source label."""

    @property
    def loss_mask(self) -> tuple[int, ...]:
        """1 on response tokens, 0 on prompt tokens."""
        return (0,) * self.prompt_length + (1,) * (len(self.ids) - self.prompt_length)


def asset_path() -> Path:
    """The packaged token file: greedy answers of SmolLM2-135M-Instruct, 3,247 documents."""
    return Path(__file__).parent / "assets" / "smollm2_onpolicy.jsonl.gz"


def read_token_file(path: Path) -> tuple[TokenSequence, ...]:
    """All documents of a token file, in its order.

    Raises:
        DataError: the file is missing, broken or empty, or a line lacks ``ids`` or ``n``.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            sequences = tuple(
                _parse(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)
            )
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}). Expected a .jsonl or .jsonl.gz token file."
        ) from error
    if not sequences:
        raise DataError(f"{path}: holds no line. Expected one JSON object a document.")
    return sequences


def _parse(line: str, place: str) -> TokenSequence:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise DataError(
            f"{place}: not JSON ({error}). Expected an object with ids and n."
        ) from error
    if not isinstance(fields, dict):
        raise DataError(f"{place}: {_shown(fields)}, expected an object with ids and n.")
    ids: Any = fields.get("ids")
    prompt_length: Any = fields.get("n")
    if not _is_id_list(ids):
        raise DataError(f"{place}: key 'ids' is {_shown(ids)}, expected a list of at least one id.")
    if type(prompt_length) is not int or not 0 <= prompt_length <= len(ids):
        raise DataError(
            f"{place}: key 'n' is {_shown(prompt_length)}, expected the number of prompt tokens, "
            f"0 to {len(ids)}."
        )
    return TokenSequence(tuple(ids), prompt_length, str(fields.get("kind", "")))


def _is_id_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int and i >= 0 for i in value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def spread_subset(
    sequences: Sequence[_Item], num_samples: int | None, seed: int = 0
) -> tuple[_Item, ...]:
    """A seeded subset spread over the whole file, which may be ordered by kind.

    The file is cut into ``num_samples`` blocks of consecutive documents, equal in size to within
    one, and one document is drawn from each; the order is kept. So every kind comes in its share,
    and the same call gives the same documents. None, or as many as there are, gives all.

    Raises:
        DataError: ``num_samples`` is not between 1 and the number of documents.
    """
    count = len(sequences)
    wanted = count if num_samples is None else num_samples
    if not 1 <= wanted <= count:
        raise DataError(f"num_samples is {wanted}, expected 1 to {count}, the documents there are.")
    draw = random.Random(seed)
    bounds = [block * count // wanted for block in range(wanted + 1)]
    return tuple(
        sequences[start + int(draw.random() * (end - start))] for start, end in pairwise(bounds)
    )
