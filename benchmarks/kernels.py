"""The Triton kernels: what they take of each kind of card, and their time on one.

    python benchmarks/kernels.py --compile-only [--quick] [--check] [--out FILE]

Compiles every kernel for each card in ``CARDS``; that needs no card. The production functions are
called on tensors without data, and what they would launch is compiled, with the same arguments and
constants and the same hints (strides and pointers divisible by 16). Shared memory is what Triton
states; registers and spills are what ``ptxas``, which comes with it, says as it assembles them.

``--quick`` compiles for bfloat16, heads of 128, one and six own-column keys, and two mixes.

Without ``--compile-only``, on a machine with a card, the kernels are also timed against the same
functions in PyTorch. That half has not been run yet: no figure of it stands anywhere.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from eagle3 import __version__
from eagle3.ops.distillation import LOSSES, closed_form, triton_rows
from eagle3.ops.ttt_attention import own_column, own_column_triton

CARDS = {80: "A100", 90: "H100, H200", 100: "B200", 120: "RTX PRO 6000"}
"""Compute capability without its dot."""
VOCABULARY, HEADS, GROUP = 32_000, 32, 4
MIXES = {
    **{name: [(name, 1.0)] for name in LOSSES},
    "all": [(name, 1.0 / len(LOSSES)) for name in LOSSES],
}
OWN_KEYS, HEAD_DIMS = (1, 2, 6), (64, 128)
DTYPES = (torch.bfloat16, torch.float32)

AT_MOST = {"largest_shared_bytes": 101_375, "largest_spill_bytes": 0}
"""A program of an RTX PRO 6000 has 101,376 bytes of shared memory, the least of these cards."""
AT_LEAST = {"rows_torch_over_triton": 1.0, "own_column_torch_over_triton": 1.0}


@dataclass(frozen=True)
class Cost:
    """What one compiled kernel takes."""

    shared_bytes: int
    """Of a program."""
    registers: int
    """Of a thread."""
    spill_bytes: int
    """Stores and loads of registers that did not fit, of a thread."""


@dataclass
class Launches:
    """Stands where a kernel does, and keeps what it is launched with."""

    kernel: Any
    arguments: list[dict[str, Any]] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        names = self.kernel.arg_names

        def launch(*args: Any, **kwargs: Any) -> None:
            self.arguments.append(dict(zip(names, args, strict=False)) | kwargs)

        return launch


def main() -> int:
    args = arguments()
    if not (args.compile_only or torch.cuda.is_available()):
        print("found no CUDA device to time the kernels on; use --compile-only", file=sys.stderr)
        return 2
    ratios = compile_all(args.quick)
    if not args.compile_only:
        ratios |= timed(args.quick)
    return finish(ratios, args)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--compile-only", action="store_true", help="compile; needs no card")
    parser.add_argument("--quick", action="store_true", help="a few variants of each kernel")
    parser.add_argument("--check", action="store_true", help="exit 1 outside the thresholds")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    return parser.parse_args()


def compile_all(quick: bool) -> dict[str, float]:
    """One line a variant and card; the worst of all."""
    # A kernel from the cache has no log.
    triton.knobs.compilation.always_compile = True
    triton.knobs.nvidia.dump_ptxas_log = True
    print(f"V {VOCABULARY:,}, {HEADS} query heads in groups of {GROUP}; bytes of shared memory, "
          "registers of a thread, bytes spilled")  # fmt: skip
    print(f"{'kernel':<50} {'card':>7} {'shared':>8} {'registers':>10} {'spills':>7}  verdict")
    costs = []
    for variant, kernel, launch in launches(quick):
        for capability in CARDS:
            cost = compiled(kernel, launch, capability)
            costs.append(cost)
            print(f"{variant:<50} {f'sm_{capability}':>7} {cost.shared_bytes:>8,} "
                  f"{cost.registers:>10} {cost.spill_bytes:>7}  {verdict(cost)}")  # fmt: skip
    print(", ".join(f"sm_{capability}: {card}" for capability, card in CARDS.items()))
    return {
        "compiled": len(costs),
        "largest_shared_bytes": max(cost.shared_bytes for cost in costs),
        "largest_registers": max(cost.registers for cost in costs),
        "largest_spill_bytes": max(cost.spill_bytes for cost in costs),
    }


def verdict(cost: Cost) -> str:
    """In words."""
    if cost.shared_bytes > AT_MOST["largest_shared_bytes"]:
        return "too much shared memory"
    return "spills" if cost.spill_bytes > AT_MOST["largest_spill_bytes"] else "fits"


def launches(quick: bool) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(variant, kernel, its arguments by name) of all launches that production makes."""
    for dtype in DTYPES[:1] if quick else DTYPES:
        short = str(dtype).removeprefix("torch.")
        for name in ("kl", "all") if quick else MIXES:
            yield from row_launches(dtype, name, short)
        for head_dim in HEAD_DIMS[-1:] if quick else HEAD_DIMS:
            for keys in (OWN_KEYS[0], OWN_KEYS[-1]) if quick else OWN_KEYS:
                variant = f"{short} head_dim {head_dim}, {keys} own keys"
                yield from own_column_launches(dtype, head_dim, keys, variant)


def row_launches(
    dtype: torch.dtype, name: str, short: str
) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Training and validation of one mix; the verifier's kernel, which knows no mix, with kl."""
    draft, verifier, targets, weights = rows(8, VOCABULARY, dtype, "meta")
    kinds = {"training": {"weights": weights}, "validation": {"with_overlap": True}}
    for kind, options in kinds.items():
        names = ("verifier_kernel", "row_kernel")
        with recording(triton_rows, names) as (of_verifier, of_rows):
            triton_rows.row_statistics(draft, verifier, targets, MIXES[name], **options)
        if (name, kind) == ("kl", "training"):
            yield f"verifier {short}", of_verifier.kernel, of_verifier.arguments[0]
        yield f"rows {short} {name} {kind}", of_rows.kernel, of_rows.arguments[0]


def own_column_launches(
    dtype: torch.dtype, head_dim: int, keys: int, variant: str
) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Both directions."""
    query, lse, own_keys, own_values = heads(8, head_dim, keys, dtype, "meta")
    with recording(own_column_triton, ("merge_kernel", "backward_kernel")) as (merge, backward):
        out, lse = own_column_triton.merge(query, query, lse, own_keys, own_values)
        own_column_triton.backward(out, query, out, lse, own_keys, own_values, query.float())
    yield f"merge {variant}", merge.kernel, merge.arguments[0]
    yield f"backward {variant}", backward.kernel, backward.arguments[0]


@contextmanager
def recording(module: ModuleType, names: tuple[str, ...]) -> Iterator[list[Launches]]:
    """The module keeps launches of these kernels instead of running them."""
    recorders = [Launches(getattr(module, name)) for name in names]
    for name, recorder in zip(names, recorders, strict=True):
        setattr(module, name, recorder)
    try:
        yield recorders
    finally:
        for name, recorder in zip(names, recorders, strict=True):
            setattr(module, name, recorder.kernel)


def rows(
    count: int, width: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draft logits, verifier logits, targets and weights."""
    draft = torch.randn(count, width, device=device).to(dtype)
    verifier = torch.randn(count, width, device=device).to(dtype)
    return (
        draft,
        verifier,
        torch.arange(count, device=device),
        torch.full((count,), 1 / count, device=device),
    )


def heads(
    count: int, head_dim: int, keys: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Query, log-sum-exp as the CUDA operator lays it, own-column keys and values."""

    def some(number: int) -> Tensor:
        return torch.randn(count, number, head_dim, device=device).to(dtype)

    query, lse = some(HEADS), torch.randn(HEADS, count, device=device).t()
    own = [some(HEADS // GROUP) for _ in range(2 * keys)]
    return query, lse, own[:keys], own[keys:]


def compiled(kernel: Any, launch: dict[str, Any], capability: int) -> Cost:
    """Compile what was launched."""
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    hints: dict[tuple[int, ...], list[list[Any]]] = {}
    for place, parameter in enumerate(kernel.params):
        value = launch[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[place,] = "constexpr", value
        else:
            signature[parameter.name] = kind_of(value, (place,), constants, hints)
    source = ASTSource(kernel, signature, constants, hints)
    options = {name: value for name, value in launch.items() if name not in signature}
    log = io.StringIO()
    with redirect_stdout(log):
        found = triton.compile(source, GPUTarget("cuda", capability, 32), options)
    (registers,) = re.findall(r"Used (\d+) registers", log.getvalue())
    spills = re.findall(r"(\d+) bytes spill", log.getvalue())
    return Cost(found.metadata.shared, int(registers), sum(int(each) for each in spills))


def kind_of(
    value: Any,
    place: tuple[int, ...],
    constants: dict[tuple[int, ...], Any],
    hints: dict[tuple[int, ...], list[list[Any]]],
) -> Any:
    """Triton's name of an argument's type; notes what a launch would specialise on."""
    if isinstance(value, tuple):
        kinds = [kind_of(v, (*place, i), constants, hints) for i, v in enumerate(value)]
        return type(value)(*kinds) if hasattr(value, "_fields") else tuple(kinds)
    if value is None or (isinstance(value, int) and value == 1):
        constants[place] = value
        return "constexpr"
    if isinstance(value, int) and value % 16 != 0:
        return "i32"
    # The allocator aligns tensors far beyond 16 bytes.
    hints[place] = [["tt.divisibility", 16]]
    if isinstance(value, int):
        return "i32"
    names = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int64: "i64"}
    return f"*{names[value.dtype]}"


def timed(quick: bool) -> dict[str, float]:
    """Milliseconds on this machine's card, and PyTorch's time over Triton's."""
    count = 1024 if quick else 4096
    draft, verifier, targets, weights = rows(count, VOCABULARY, torch.bfloat16, "cuda")
    query, lse, keys, values = heads(count, HEAD_DIMS[-1], 2, torch.bfloat16, "cuda")

    def judge(module: ModuleType) -> None:
        module.row_statistics(draft, verifier, targets, MIXES["kl"], weights=weights)

    def attend(module: ModuleType) -> None:
        out, merged = module.merge(query, query, lse, keys, values)
        module.backward(out, query, out, merged, keys, values, torch.zeros_like(query).float())

    print(f"\n{torch.cuda.get_device_name()}, {count:,} rows, bfloat16, milliseconds")
    print(f"{'':<12} {'PyTorch':>9} {'Triton':>9}")
    ratios = {}
    for name, run, modules in (
        ("rows", judge, (closed_form, triton_rows)),
        ("own_column", attend, (own_column, own_column_triton)),
    ):
        plain, fused = (
            triton.testing.do_bench(lambda run=run, module=module: run(module))
            for module in modules
        )
        print(f"{name:<12} {plain:>9.3f} {fused:>9.3f}")
        ratios[f"{name}_torch_over_triton"] = plain / fused
    return ratios


def finish(ratios: dict[str, float], args: argparse.Namespace) -> int:
    """Versions, misses, and the JSON as the last line."""
    print(f"\neagle3 {__version__}, torch {torch.__version__}, triton {triton.__version__}, "
          f"Python {platform.python_version()}, {os.cpu_count()} cores"
          f"{', quick' if args.quick else ''}")  # fmt: skip
    missed = [k for k, least in AT_LEAST.items() if k in ratios and ratios[k] < least]
    missed += [k for k, most in AT_MOST.items() if k in ratios and ratios[k] > most]
    for key in missed:
        limit = f"at least {AT_LEAST[key]}" if key in AT_LEAST else f"at most {AT_MOST[key]}"
        print(f"outside the threshold: {key} = {ratios[key]}, {limit}")
    line = json.dumps({key: round(value, 4) for key, value in ratios.items()})
    if args.out is not None:
        args.out.write_text(line + "\n")
    print(line)
    return int(args.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
