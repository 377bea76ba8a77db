"""Documents with the states of a large verifier, written for a benchmark of the disk; and PyTorch's
own way of reading them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from eagle3.convert import ConvertRequest, convert
from eagle3.data.corpus import Corpus
from eagle3.data.declaration import Declaration
from eagle3.data.layout import StateLayout
from eagle3.data.plan import EpochPlan
from eagle3.names import LastHidden, LayerIdConvention

LAYOUT = StateLayout(num_aux_layers=3, hidden_size=7168, vocab_size=163_840)
DECLARED = Declaration((2, 30, 58), LayerIdConvention.entering, LastHidden.pre_norm)
ROW_BYTES = LAYOUT.width * 2
MEAN_TOKENS, SIGMA, SHORTEST, LONGEST = 2353, 0.8, 16, 8192


def write_states(folder: Path, size: int, threads: int) -> tuple[Path, Path]:
    """Both directories, on the disk and out of the page cache."""
    rng = np.random.default_rng(0)
    mean_log = np.log(MEAN_TOKENS) - SIGMA**2 / 2
    pool = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    v1, left, number = folder / "v1", size // ROW_BYTES, 0
    v1.mkdir()
    while left >= SHORTEST:
        tokens = int(np.clip(rng.lognormal(mean_log, SIGMA), SHORTEST, min(LONGEST, left)))
        document: dict[str, Any] = {
            "input_ids": torch.from_numpy(rng.integers(0, LAYOUT.vocab_size, tokens)),
            "loss_mask": (torch.arange(tokens) >= int(tokens * rng.uniform(0.3, 0.7))).long(),
            "hidden_states": [some_states(pool, tokens, rng) for _ in range(4)],
        }
        path = v1 / f"data_{number}.pt"
        torch.save(document, path)
        sync(path)
        left, number = left - tokens, number + 1
    native = folder / "native"
    request = ConvertRequest(v1, native, LAYOUT, DECLARED, folder / "cache", num_workers=threads)
    convert(request, lambda line: None)
    return v1, native


def some_states(pool: Tensor, tokens: int, rng: np.random.Generator) -> Tensor:
    """[tokens, H], cut from normal numbers that were made once."""
    values = tokens * LAYOUT.hidden_size
    starts = rng.integers(0, len(pool) // 2, -(-values // (len(pool) // 2)))
    parts = [pool[start : start + len(pool) // 2] for start in starts.tolist()]
    return torch.cat(parts)[:values].view(tokens, LAYOUT.hidden_size).clone()


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def forget(folder: Path) -> None:
    """Take every file out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


class TorchPacks(Dataset[tuple[Tensor, Tensor, int]]):
    """The same rows of the same packs, by ``torch.load``; first one empty item for each worker."""

    def __init__(self, corpus: Corpus, plan: EpochPlan, max_seq_len: int, workers: int) -> None:
        self.paths = [str(corpus.path(document)) for document in range(len(corpus))]
        self.packs = [plan.rank_window(step, 0)[0] for step in range(plan.steps)]
        self.max_seq_len, self.workers = max_seq_len, workers

    def __len__(self) -> int:
        return self.workers + len(self.packs)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor, int]:
        if place < self.workers:
            return torch.empty(0), torch.empty(0), 0
        aux = torch.zeros(self.max_seq_len, LAYOUT.aux_width, dtype=torch.bfloat16)
        last = torch.zeros(self.max_seq_len, LAYOUT.hidden_size, dtype=torch.bfloat16)
        at = count = 0
        for segment in self.packs[place - self.workers]:
            found = torch.load(self.paths[segment.document], mmap=True, weights_only=True)
            rows, shifted = (
                slice(segment.start, segment.stop),
                slice(segment.start + 1, segment.stop + 1),
            )
            states, size = found["hidden_states"], LAYOUT.hidden_size
            for k in range(3):
                aux[at : at + segment.rows, k * size : (k + 1) * size] = states[k][rows]
            gates = found["loss_mask"][shifted].bool()
            first = int(gates.int().argmax())  # an answer reaches to the end of its document
            last[at + first : at + segment.rows] = states[3][shifted][first:]
            at += segment.rows
            count += (aux.shape[1] * segment.rows + size * int(gates.sum())) * 2
        return aux, last, count
