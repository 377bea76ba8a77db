"""Lets the engines' draft classes run on a CPU: stand-ins for what needs a card.

Runs in an environment of its own (``make engine-check``), without this package. Replaced are the
attention back end, by plain causal attention over one sequence, and fused kernels, by the engines'
own ``forward_native``. Everything else, above all names, shapes and loading, is the engines'.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Nothing:
    """Stands for any class, function or decorator of a package that is not there."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *given: Any, **options: Any) -> Any:
        return given[0] if len(given) == 1 and callable(given[0]) and not options else _Nothing()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()

    def __or__(self, other: object) -> _Nothing:
        return self

    __ror__ = __or__

    def __getitem__(self, key: object) -> _Nothing:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __mro_entries__(self, bases: object) -> tuple[type, ...]:
        return (object,)


class _Module(types.ModuleType):
    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, absent: frozenset[str]) -> None:
        self._absent = absent

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] not in self._absent:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> _Module:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def install(absent: str) -> None:
    """From here on these packages can be imported, which nothing here uses."""
    sys.meta_path.append(_Finder(frozenset(absent.split())))


class Loose(types.SimpleNamespace):
    """A configuration object of which only some fields matter; the others are None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)


class PlainAttention(nn.Module):
    """Causal attention over the one sequence that was fed so far, with its cache."""

    def __init__(self, heads: int, head_dim: int, scale: float, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.head_dim, self.scale, self.kv_heads = heads, head_dim, scale, kv_heads
        self.cache: list[tuple[Tensor, Tensor]] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Flat [n, heads * D] of the next n tokens -> [n, heads * D]."""
        self.cache.append((key, value))
        keys, values = (torch.cat(each) for each in zip(*self.cache, strict=True))
        shape = (-1, self.head_dim)
        q, k, v = (t.unflatten(-1, shape).transpose(0, 1) for t in (query, keys, values))
        n, total = q.shape[1], k.shape[1]
        seen = torch.ones(n, total, dtype=torch.bool).tril(total - n)
        repeats = self.heads // self.kv_heads
        k, v = (t.repeat_interleave(repeats, dim=0) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.scale)
        return out.transpose(0, 1).flatten(1)


def use_native_kernels(model: nn.Module) -> None:
    """Every layer that chooses among kernels takes its plain PyTorch form."""
    for module in model.modules():
        native = getattr(module, "forward_native", None)
        if native is not None:
            module._forward_method = native
            module.forward = native
