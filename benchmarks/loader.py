"""The loader against the bare disk, and against ``torch.load`` in a PyTorch ``DataLoader``.

    python benchmarks/loader.py [--quick] [--check] [--out FILE] [--dir DIR] [--gb 4] [--threads 4]

Writes documents with the states of a large verifier (4 layers of 7,168 bfloat16 values, 57 KB a
token; log-normal lengths, mean 2,353 tokens, 30 % to 70 % of each an answer) as speculators v1
files, converts them to the native format, and removes both at the end. Then, in turns and each time
with files that the page cache does not hold:

* the bare disk: as many threads as the loader has read the native shards from end to end, past the
  page cache and through it, and throw the bytes away; the faster way counts;
* the loader: one epoch of packs of 4,096 rows, both formats, both ways of reading. Its clock starts
  with the fourth pack, when all of its memory has been used once, and counts the bytes whose read
  begins after that. What counts is the way that ``data.read_mode=auto`` chooses for data that do
  not fit into memory;
* ``torch.load(mmap=True)`` in as many worker processes as the loader has threads, copying the same
  rows into the same packs. Its clock starts when its first worker is up.

Rates are bytes read over wall time (``torch.load``: of wanted states), CPU seconds those of all
processes, memory the peak of this process over its start (the workers of ``torch.load`` are
others). Ratios are taken within a round; the median of the rounds counts.

``--quick`` takes less than 1 GB and packs of 512 rows. ``--dir`` must not lie in memory.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import queue
import resource
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from states_on_disk import DECLARED, LAYOUT, ROW_BYTES, TorchPacks, forget, write_states
from torch.utils.data import DataLoader

from eagle3 import __version__
from eagle3.data.bad_samples import BadSamples
from eagle3.data.buffers import huge_pages
from eagle3.data.byte_reader import (
    BufferedReader,
    ByteReader,
    Bytes,
    DirectReader,
    IndexedFile,
    PageCache,
)
from eagle3.data.corpus import Corpus
from eagle3.data.formats import open_store
from eagle3.data.loader import PackReader, WindowLoader
from eagle3.data.packing import PackingRule, segment_documents
from eagle3.data.plan import EpochPlan, training_plan
from eagle3.data.read_mode import choose_reader
from eagle3.data.reading import StateReader
from eagle3.data.shards import Shards, open_shards
from eagle3.names import LongDocuments, ReadMode, TrainOn

ROOT = Path(__file__).parents[1]
PREFETCH, WARM_WINDOWS, CHUNK_BYTES = 2, 3, 4 << 20
AT_LEAST = {
    "v1_over_raw": 0.85,
    "native_over_raw": 0.85,
    "v1_over_torch_load": 2.0,
    "native_over_torch_load": 2.0,
}
AT_MOST = {"memory_over_allowance": 1.0}
"""The allowance is three packs and 500 MB."""


@dataclass(frozen=True)
class Run:
    """One measurement."""

    read_bytes: int
    wall_s: float
    cpu_s: float
    memory: int
    """Bytes of this process over its start, at the peak."""

    @property
    def rate(self) -> float:
        """GB/s"""
        return self.read_bytes / self.wall_s / 1e9


Clock = Callable[[], None]
Contender = Callable[[Clock], int]
"""Calls the clock when it begins, reads, and returns the bytes of wanted states."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="less than 1 GB, small packs")
    parser.add_argument("--check", action="store_true", help="exit 1 outside the thresholds")
    parser.add_argument("--out", type=Path, help="file for the table and the ratios")
    parser.add_argument("--dir", type=Path, default=ROOT / ".cache", help="disk to measure")
    parser.add_argument("--gb", type=float, help="size of each format, default 4 (quick: 0.45)")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--rounds", type=int, help="default 5 (quick: 2)")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    logging.basicConfig(format="%(message)s")
    torch.set_num_threads(1)
    size = (args.gb or (0.45 if args.quick else 4.0)) * 1e9
    rounds, max_seq_len = args.rounds or (2 if args.quick else 5), 512 if args.quick else 4096
    args.dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="loader-benchmark-", dir=args.dir))
    try:
        lines = [
            f"eagle3 {__version__}, torch {torch.__version__}, {platform.machine()}, "
            f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {args.threads} threads, packs "
            f"of {max_seq_len} rows ({max_seq_len * ROW_BYTES / 1e6:.0f} MB), {PREFETCH} ahead"
        ]
        v1, native = write_states(folder, int(size), args.threads)
        bench = Bench(folder, v1, native, args.threads, max_seq_len)
        lines.append(bench.describe())
        runs = measure(bench.contenders(), lambda: forget(folder), rounds)
        lines += [line for name, found in runs.items() for line in [row(name, found)]]
        ratios = bench.ratios(runs)
    finally:
        shutil.rmtree(folder)
    return finish(lines, ratios, args)


class Bench:
    """What runs against what."""

    def __init__(
        self, folder: Path, v1: Path, native: Path, threads: int, max_seq_len: int
    ) -> None:
        self.threads, self.max_seq_len = threads, max_seq_len
        self.raw_files = sorted(native.glob("*.safetensors"))
        self.shards = {"v1": self.open(v1, folder), "native": self.open(native, folder)}
        chosen = {}
        for name, shards in self.shards.items():
            forget(folder)
            files = shards.reader.files
            chosen[name] = choose_reader(ReadMode.auto, files, threads, available_bytes=0).mode
        self.chosen = chosen

    def open(self, directory: Path, folder: Path) -> Shards:
        return open_shards(
            directory,
            LAYOUT,
            DECLARED,
            train_on=TrainOn.assistant,
            max_samples=None,
            cache=folder / "cache",
            bad_samples=BadSamples(0),
            num_workers=self.threads,
        )

    def describe(self) -> str:
        index = self.shards["v1"].index
        return (
            f"{len(index)} documents, {int(index.lengths.sum()):,} tokens, "
            f"{int(index.lengths.sum()) * ROW_BYTES / 1e9:.2f} GB in each format; auto chooses "
            + ", ".join(f"{mode} for {name}" for name, mode in self.chosen.items())
        )

    def contenders(self) -> dict[str, Contender]:
        found: dict[str, Contender] = {
            "raw direct": lambda clock: self.raw(os.O_DIRECT, clock),
            "raw buffered": lambda clock: self.raw(0, clock),
        }
        for name, shards in self.shards.items():
            for reader in map(Counting, (DirectReader(), BufferedReader(PageCache.drop))):
                run = partial(epoch, self.loader(shards, reader), reader)
                found[f"{name} {reader.mode}"] = run
        found["torch.load"] = self.torch_load
        return found

    def corpus(self, shards: Shards, reader: ByteReader) -> Corpus:
        store = open_store(shards.directory, LAYOUT)
        state_reader = StateReader(store, shards.index, reader)
        return Corpus.join([Shards(**{**vars(shards), "reader": state_reader})])

    def loader(self, shards: Shards, reader: ByteReader) -> WindowLoader:
        corpus = self.corpus(shards, reader)
        return WindowLoader(
            plan=plan(corpus, self.max_seq_len),
            reader=PackReader(corpus),
            bad_samples=BadSamples(0),
            max_seq_len=self.max_seq_len,
            rank=0,
            epoch=0,
            num_workers=self.threads,
            prefetch_windows=PREFETCH,
        )

    def raw(self, flags: int, clock: Clock) -> int:
        """Threads share the chunks of the shards, in order, and drop what they read."""
        files = [
            (os.open(path, os.O_RDONLY | flags), path.stat().st_size) for path in self.raw_files
        ]
        chunks: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        for file, size in files:
            for offset in range(0, size, CHUNK_BYTES):
                chunks.put((file, offset))
        counts: list[int] = []

        def work() -> None:
            memory = huge_pages(CHUNK_BYTES).data
            while (chunk := chunks.get()) is not None:
                counts.append(os.preadv(chunk[0], [memory], chunk[1]))

        threads = [threading.Thread(target=work) for _ in range(self.threads)]
        clock()
        for thread in threads:
            chunks.put(None)
            thread.start()
        for thread in threads:
            thread.join()
        for file, _ in files:
            os.close(file)
        assert sum(counts) == sum(size for _, size in files), "a read was cut short"
        return sum(counts)

    def torch_load(self, clock: Clock) -> int:
        shards = self.shards["v1"]
        corpus = self.corpus(shards, BufferedReader())
        packs = TorchPacks(corpus, plan(corpus, self.max_seq_len), self.max_seq_len, self.threads)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # more workers than cores
            batches = iter(DataLoader(packs, batch_size=None, num_workers=self.threads))
        next(batches)
        clock()
        return sum(count for _, _, count in batches)

    def ratios(self, runs: dict[str, list[Run]]) -> dict[str, float]:
        def rate(name: str) -> float:
            return median(run.rate for run in runs[name])

        def over(name: str, other: str) -> float:
            return median(a.rate / b.rate for a, b in zip(runs[name], runs[other], strict=True))

        raw = max(("raw direct", "raw buffered"), key=rate)
        ours = {name: f"{name} {mode}" for name, mode in self.chosen.items()}
        allowance = 3 * self.max_seq_len * ROW_BYTES + 500e6
        loaders = [name for name in runs if name.split()[0] in ours]
        peak = max(run.memory for name in loaders for run in runs[name])
        ratios = {f"{name}_over_raw": over(mine, raw) for name, mine in ours.items()}
        ratios |= {
            f"{name}_over_torch_load": over(mine, "torch.load") for name, mine in ours.items()
        }
        for name, mine in (*ours.items(), ("torch_load", "torch.load")):
            ratios[f"{name}_cpu_s_per_gb"] = median(
                run.cpu_s / run.read_bytes * 1e9 for run in runs[mine]
            )
        return ratios | {"memory_over_allowance": peak / allowance}


class Counting:
    """Notes how much a reader began to read; what was under way at a time is not counted after."""

    def __init__(self, reader: ByteReader) -> None:
        self.mode, self.counts, self._reader = reader.mode, [0], reader

    def read(self, file: IndexedFile, offset: int, count: int) -> Bytes:
        self.counts.append(count)
        return self._reader.read(file, offset, count)

    def read_into(self, file: IndexedFile, offset: int, out: Bytes) -> None:
        self.counts.append(len(out))
        self._reader.read_into(file, offset, out)


def plan(corpus: Corpus, max_seq_len: int) -> EpochPlan:
    rule = PackingRule(max_seq_len, LongDocuments.split, 128, 3)
    documents = np.arange(len(corpus))
    segments = segment_documents(documents, corpus.lengths, corpus.gates, rule).segments
    return training_plan(segments, max_seq_len, 0, 0, 1, 1)


def epoch(loader: WindowLoader, reader: Counting, clock: Clock) -> int:
    """The clock starts when all memory of the loader is in use, and counts what is read since."""
    before = 0
    for window in loader:
        if window.step == WARM_WINDOWS:
            before = sum(reader.counts)
            clock()
    return sum(reader.counts) - before


def measure(
    contenders: dict[str, Contender], forget: Callable[[], None], rounds: int
) -> dict[str, list[Run]]:
    """In turns, each round beginning with another contender; one round first to warm up."""
    names = list(contenders)
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for place in range(len(names)):
            name = names[(place + number) % len(names)]
            forget()
            run = measure_one(contenders[name])
            if number:
                runs[name].append(run)
            print(f"round {number}: {name:16} {run.rate:5.2f} GB/s", file=sys.stderr)
    return runs


def measure_one(contender: Contender) -> Run:
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    memory, started = status("VmRSS"), [0.0, 0.0]

    def clock() -> None:
        started[:] = time.perf_counter(), cpu_seconds()

    read_bytes = contender(clock)
    wall_s, cpu_s = time.perf_counter() - started[0], cpu_seconds() - started[1]
    return Run(read_bytes, wall_s, cpu_s, status("VmHWM") - memory)


def cpu_seconds() -> float:
    """Of this process, and of its children that ended."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    usages = [resource.getrusage(kind) for kind in kinds]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def status(key: str) -> int:
    """A size in bytes that the system keeps of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def row(name: str, runs: list[Run]) -> str:
    rates = [run.rate for run in runs]
    cpu = median(run.cpu_s / run.read_bytes * 1e9 for run in runs)
    memory = max(run.memory for run in runs)
    return (
        f"{name:16} {median(rates):6.2f} GB/s [{min(rates):.2f}..{max(rates):.2f}]  "
        f"{cpu:5.2f} CPU s/GB  {memory / 1e6:6.0f} MB"
    )


def finish(lines: list[str], ratios: dict[str, float], args: argparse.Namespace) -> int:
    """Print the table, the verdict, and the ratios as JSON."""
    missed = [name for name, least in AT_LEAST.items() if ratios[name] < least]
    missed += [name for name, most in AT_MOST.items() if ratios[name] > most]
    bounds = [f"{name} >= {least}" for name, least in AT_LEAST.items()]
    bounds += [f"{name} <= {most}" for name, most in AT_MOST.items()]
    lines.append(f"thresholds: {', '.join(bounds)}: missed {', '.join(missed) or 'none'}")
    lines.append(json.dumps({name: round(ratio, 3) for name, ratio in ratios.items()}))
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")
    return int(args.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
