"""Documents to read, with the supervised tokens marked."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from eagle3.inspection.facts import Shown, Span
from eagle3.token_text import Decode

_HEAD, _TAIL = 500, 200
_BOLD_GREEN, _RESET = "\033[1;32m", "\033[0m"


def shown_document(
    name: str, input_ids: NDArray[np.int64], mask: NDArray[np.bool_], decode: Decode
) -> Shown:
    """Decode each run of supervised or other tokens by itself.

    Args:
        name: of the document.
        input_ids: [n].
        mask: [n], supervised tokens.
        decode: token ids to text.
    """
    return Shown(name, tuple(_spans(input_ids, mask, decode)))


def marked(shown: Shown, *, colour: bool) -> str:
    """Text in which ``[[...]]`` holds what is supervised, green on a terminal; long spans cut."""
    opening, closing = (_BOLD_GREEN, _RESET) if colour else ("[[", "]]")
    return "".join(
        f"{opening}{_cut(span.text)}{closing}" if span.supervised else _cut(span.text)
        for span in shown.spans
    )


def _spans(input_ids: NDArray[np.int64], mask: NDArray[np.bool_], decode: Decode) -> Iterator[Span]:
    borders = np.flatnonzero(np.diff(mask)) + 1
    for start, stop in pairwise([0, *borders.tolist(), len(mask)]):
        text = decode(input_ids[start:stop].tolist())
        yield Span(bool(mask[start]), stop - start, text)


def _cut(text: str) -> str:
    if len(text) <= _HEAD + _TAIL:
        return text
    left_out = len(text) - _HEAD - _TAIL
    return f"{text[:_HEAD]} ... {left_out:,} characters ... {text[-_TAIL:]}"
