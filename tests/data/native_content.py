"""Random documents, and native directories of them."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle3.data import native_shard_writer
from eagle3.data.hashing import hash_document
from eagle3.data.layout import StateLayout
from eagle3.data.masks import Runs, supervised_runs
from eagle3.data.native_index import Documents
from eagle3.data.native_manifest import StateFacts, VerifierFacts
from eagle3.data.native_writer import NativeWriter
from eagle3.names import LastHidden

LAYOUT = StateLayout(num_aux_layers=2, hidden_size=3, vocab_size=50)
FACTS = StateFacts(LAYOUT, "bfloat16", (1, 4), LastHidden.pre_norm)
LENGTHS = (5, 2, 9, 7, 3, 4)
SHARD_BYTES = 400
"""Fourteen tokens of 27 bytes: shards of 2, 1 and 3 documents."""


class Content:
    """Random documents."""

    def __init__(self, lengths: tuple[int, ...] = LENGTHS, dtype: str = "bfloat16") -> None:
        generator = torch.Generator().manual_seed(len(lengths))
        kind = getattr(torch, dtype)
        self.facts = replace(FACTS, dtype=dtype)
        self.ids = [torch.randint(0, 50, (n,), generator=generator) for n in lengths]
        self.masks = [torch.rand(n, generator=generator) > 0.5 for n in lengths]
        self.aux = [torch.randn(n, LAYOUT.aux_width, generator=generator).to(kind) for n in lengths]
        self.last = [
            torch.randn(n, LAYOUT.hidden_size, generator=generator).to(kind) for n in lengths
        ]
        runs = [supervised_runs(mask.numpy()) for mask in self.masks]
        pairs = zip(self.ids, runs, strict=True)
        hashes = np.array([hash_document(ids.numpy(), own) for ids, own in pairs], np.uint64)
        self.documents = Documents(
            lengths=np.array(lengths, np.int64),
            runs=Runs.stack(runs),
            sample_hash=hashes[:, 0],
            prompt_hash=hashes[:, 1],
            sources=("code", "chat"),
            source=np.arange(len(lengths)) % 2,
        )

    def writer(
        self, directory: Path, job: str = "job", shard_bytes: int = SHARD_BYTES
    ) -> NativeWriter:
        return NativeWriter(directory, self.facts, self.documents, job, shard_bytes)

    def fill(self, shard: native_shard_writer.ShardWriter, document: int, chunk: int = 3) -> None:
        out = shard.document(document)
        for start in range(0, len(self.ids[document]), chunk):
            rows = slice(start, start + chunk)
            out.rows(self.aux[document][rows], self.last[document][rows])
        out.close(self.ids[document], self.masks[document])

    def write(self, directory: Path, **arguments: Any) -> Path:
        with self.writer(directory, **arguments) as writer:
            self.write_shards(writer)
            writer.complete(VerifierFacts("toy", "0a1b", None, "fp8"), "tests")
        return directory

    def write_shards(self, writer: NativeWriter) -> None:
        for number in range(writer.num_shards):
            shard = writer.open(number)
            if shard is not None:
                for document in shard.missing:
                    self.fill(shard, document)
                writer.finish(shard)


def tree(directory: Path) -> dict[str, str]:
    """Every file and its content."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0x10
    path.write_bytes(content)
