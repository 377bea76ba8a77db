"""``compute.compile``: the row-wise parts of the decoder layer through ``torch.compile``.

Compiled are the two norms in front, the rotation of queries and keys, and everything behind
attention; attention itself and the loss have implementations of their own. The number of rows
changes at every step, so it is left open in every graph, and no layout but the dense one is let in:
after the first step nothing should be left to compile. Methods are replaced, modules stay what they
are, so the names in a checkpoint do not change.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import mark_dynamic
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.utils import counters
from torch._inductor.exc import CppCompileError

from eagle3.errors import TrainingError
from eagle3.model.layers import DecoderLayer


def compile_layer(layer: DecoderLayer) -> None:
    """Replace the row-wise methods of ``layer`` by compiled ones; they compile when first called.

    Without a gradient (validation) the plain methods run: the other half of the graphs would be
    compiled for a small part of a run's time.
    """
    torch.compiler.reset()  # graphs of an earlier run in this process count against a limit
    # Splitting graphs at gradient buckets is for whole models; these graphs are far smaller.
    torch._dynamo.config.optimize_ddp = False
    parts: tuple[tuple[nn.Module, str], ...] = (
        (layer.input_layernorm, "forward"),
        (layer.hidden_norm, "forward"),
        (layer.self_attn, "queries"),
        (layer.self_attn, "keys"),
        (layer, "finish"),
    )
    for module, name in parts:
        setattr(module, name, _row_wise(getattr(module, name)))


def _row_wise(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``method``, compiled once for every number of rows; tensor arguments are [rows, ...]."""
    # With fullgraph, what cannot be compiled is an error instead of a run that is silently slow.
    compiled = torch.compile(method, fullgraph=True)

    @functools.wraps(method)
    def call(*args: Any) -> Tensor:
        tensors = [value for value in args if isinstance(value, Tensor)]
        # Sizes 0 and 1 are constants to the compiler and would ask for graphs of their own.
        if not torch.is_grad_enabled() or len(tensors[0]) < 2:
            return method(*args)
        return compiled(*(_any_rows(value) for value in args))

    return call


def _any_rows(value: Any) -> Any:
    """A tensor in the one layout that graphs are made for, its first size left open."""
    if isinstance(value, Tensor):
        value = value.contiguous()
        mark_dynamic(value, 0)
    return value


class CompileLog:
    """Says when a step compiles and how long that step took, so that a wait has a reason.

    Args:
        say: prints for the rank that speaks, with the arguments of ``print``.
    """

    def __init__(self, say: Callable[..., None]) -> None:
        self._say = say
        self._first = True

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around the forward and backward passes of step ``number`` (from 1).

        Raises:
            TrainingError: the compiler failed, or no graph can be made.
        """
        first, self._first = self._first, False
        if first:
            self._say("compiling the decoder layer ...", end=" ", flush=True)
        before, started = compiled_graphs(), time.monotonic()
        try:
            yield
        except (TorchDynamoException, FailOnRecompileLimitHit, CppCompileError) as error:
            if first:
                self._say("failed", flush=True)
            raise TrainingError(
                f"compute.compile=layer failed at step {number}: {_reason(error)}\n"
                "Mend what is named here, or give compute.compile=none"
            ) from error
        added, seconds = compiled_graphs() - before, time.monotonic() - started
        if first:
            self._say(f"{added} graphs, {seconds:.1f} s with the first step", flush=True)
        elif added:
            self._say(f"compiled {added} more graphs in step {number}: {seconds:.1f} s", flush=True)


def _reason(error: Exception) -> str:
    if isinstance(error, FailOnRecompileLimitHit):
        return "one method needs more graphs than torch._dynamo.config.recompile_limit allows"
    return str(error).partition("\n\n")[0]  # below it: how to report a bug of torch


def compiled_graphs() -> int:
    """Graphs that this process has compiled so far."""
    return int(counters["stats"]["unique_graphs"])
