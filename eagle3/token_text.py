"""Token ids as text, for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

Decode = Callable[[Sequence[int]], str]


def decoder(verifier: Path) -> Decode:
    """The verifier's tokenizer where it and the ``tokenizers`` package are there, else the ids."""
    path = verifier / "tokenizer.json"
    try:
        from tokenizers import Tokenizer  # comes with the verifier extra
    except ImportError:
        return _ids
    if not path.is_file():
        return _ids
    tokenizer = Tokenizer.from_file(str(path))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def _ids(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))
