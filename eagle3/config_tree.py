"""Trees of configuration: their keys, and the key that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from omegaconf import DictConfig, ListConfig, OmegaConf


def dotted_keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """Every key below ``node``, groups included, such as ``model`` and ``model.rope``."""
    for key, child in _children(node):
        yield prefix + key
        if isinstance(child, DictConfig):
            yield from dotted_keys(child, f"{prefix}{key}.")


def thaw(node: DictConfig | ListConfig) -> None:
    """Frozen dataclasses make read-only nodes, each on its own; merging needs them writable."""
    OmegaConf.set_readonly(node, False)
    for _, child in _children(node):
        if isinstance(child, (DictConfig, ListConfig)):
            thaw(child)


def nearest(key: str, candidates: Sequence[str]) -> str:
    """The candidate most like ``key``, by its whole path or by its last part."""

    def likeness(candidate: str) -> float:
        whole = difflib.SequenceMatcher(None, key, candidate).ratio()
        last = difflib.SequenceMatcher(None, key.split(".")[-1], candidate.split(".")[-1]).ratio()
        return max(whole, last)

    return max(candidates, key=likeness)


def _children(node: DictConfig | ListConfig) -> list[tuple[str, object]]:
    if node._is_none() or node._is_missing() or node._is_interpolation():
        return []
    keys = list(node) if isinstance(node, DictConfig) else range(len(node))
    return [(str(key), node._get_node(key)) for key in keys]
