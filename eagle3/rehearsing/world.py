"""A made-up verifier, shards and vocabulary map, on which a drafter learns a little.

Token ids follow a language that can be learnt: mostly the successor of the token before, else a
draw that prefers few. For a document x_0..x_{n-1} and head rows w of length one::

    last state i    the direction that the final norm turns into w[x_{i+1}]: all on-policy
    aux state i     noise, and faintly w[x_{i+2}], which is to be drafted: some drafts are right
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

import eagle3
from eagle3.config import ModelConfig
from eagle3.data.hashing import hash_document
from eagle3.data.layout import StateLayout
from eagle3.data.native_index import Documents
from eagle3.data.native_manifest import MANIFEST_NAME, StateFacts, VerifierFacts
from eagle3.data.native_writer import NativeWriter
from eagle3.data.vocab import VocabMap
from eagle3.data.vocab_files import save_vocab_map
from eagle3.names import LastHidden
from eagle3.rehearsing.lengths import Outlines

_FOLLOWS = 0.7
"""Share of tokens that are the successor of the token before."""
_SKEW = 3.0
"""Of the logarithm of a drawn rank; 1 is Zipf's law, more makes frequent tokens more so."""
_LOUDNESS = 3.0
"""Root mean square of a last state before the norm."""
_HINT = 0.4
"""Of the coming token in an aux state, whose noise has standard deviation one."""
_NORM_SPREAD = 0.3
"""Of the logarithms of the final norm's gains."""
_SHARD_BYTES = 100_000_000
_VERSION = 1
"""Of what is written, so that other content goes to another directory."""


@dataclass(frozen=True)
class World:
    """Directories of a made-up verifier and its capture."""

    root: Path

    @property
    def verifier(self) -> Path:
        return self.root / "verifier"

    @property
    def shards(self) -> Path:
        return self.root / "shards"

    @property
    def vocab_map(self) -> Path:
        return self.root / "vocab_map.safetensors"

    @property
    def is_complete(self) -> bool:
        """The manifest is written last."""
        return (self.shards / MANIFEST_NAME).is_file()


def world_name(model: ModelConfig, drawn: Outlines, seed: int) -> str:
    """16 hexadecimal digits of all that the content follows from."""
    sizes = (_VERSION, model.hidden_size, model.vocab_size, model.draft_vocab_size)
    digest = hashlib.blake2b(repr((*sizes, model.num_aux_layers, seed)).encode(), digest_size=8)
    for array in (drawn.lengths, drawn.runs.offsets, drawn.runs.bounds):
        digest.update(np.ascontiguousarray(array, "<i8").tobytes())
    return digest.hexdigest()


def write_world(world: World, model: ModelConfig, drawn: Outlines, seed: int) -> None:
    """Write all of it; shards that an earlier call left half written are gone on with.

    Raises:
        DataError: the disk is full or refuses.
    """
    generator = torch.Generator().manual_seed(seed)
    head = torch.nn.functional.normalize(
        torch.randn(model.vocab_size, model.hidden_size, generator=generator), dim=-1
    )
    gains = (_NORM_SPREAD * torch.randn(model.hidden_size, generator=generator)).exp()
    _write_verifier(world.verifier, model, head, gains)
    ids = [
        made_up_ids(int(length), model.vocab_size, (seed, number))
        for number, length in enumerate(drawn.lengths)
    ]
    counts = torch.from_numpy(np.bincount(np.concatenate(ids), minlength=model.vocab_size))
    vocab = VocabMap.from_frequencies(counts, model.draft_vocab_size, model.vocab_size)
    save_vocab_map(world.vocab_map, vocab)
    directions = head / gains
    directions *= model.hidden_size**0.5 / directions.norm(dim=-1, keepdim=True)
    _write_shards(world.shards, model, drawn, ids, directions, seed)


def made_up_ids(length: int, vocab_size: int, seed: tuple[int, int]) -> NDArray[np.int64]:
    """int64 [length]: draws that prefer low ids, each followed by some of its successors."""
    rng = np.random.default_rng(seed)
    drawn = np.floor(vocab_size ** rng.uniform(0, 1, length) ** _SKEW).astype(np.int64) - 1
    begins = rng.uniform(0, 1, length) >= _FOLLOWS
    begins[:1] = True
    last_begin = np.maximum.accumulate(np.where(begins, np.arange(length), 0))
    return (drawn[last_begin] + np.arange(length) - last_begin) % vocab_size


def _write_verifier(directory: Path, model: ModelConfig, head: Tensor, gains: Tensor) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        "model.embed_tokens.weight": head.clone(),
        "model.norm.weight": gains,
        "lm_head.weight": head,
    }
    save_file(tensors, directory / "model.safetensors")
    config = {
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "num_hidden_layers": model.num_aux_layers + 1,
        "rms_norm_eps": model.rms_norm_eps,
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _write_shards(
    directory: Path,
    model: ModelConfig,
    drawn: Outlines,
    ids: list[NDArray[np.int64]],
    directions: Tensor,
    seed: int,
) -> None:
    runs = drawn.runs
    bounds = [runs.bounds[a:b] for a, b in zip(runs.offsets[:-1], runs.offsets[1:], strict=True)]
    hashes = [hash_document(own, run) for own, run in zip(ids, bounds, strict=True)]
    documents = Documents(
        lengths=drawn.lengths,
        runs=runs,
        sample_hash=np.array([sample for sample, _ in hashes], np.uint64),
        prompt_hash=np.array([prompt for _, prompt in hashes], np.uint64),
        sources=("made_up",),
        source=np.zeros(len(ids), np.int64),
    )
    facts = StateFacts(
        StateLayout(model.num_aux_layers, model.hidden_size, model.vocab_size),
        "bfloat16",
        tuple(range(1, model.num_aux_layers + 1)),
        LastHidden.pre_norm,
    )
    with NativeWriter(directory, facts, documents, "rehearsal", _SHARD_BYTES) as writer:
        for number in range(writer.num_shards):
            shard = writer.open(number)
            if shard is None:
                continue
            for document in shard.missing:
                own = torch.from_numpy(ids[document])
                out = shard.document(document)
                out.rows(*made_up_states(own, directions, model.num_aux_layers, (seed, document)))
                out.close(own, torch.from_numpy(runs.mask(document, len(own))))
            writer.finish(shard)
        writer.complete(VerifierFacts("made_up"), f"eagle3 {eagle3.__version__}")


def made_up_states(
    ids: Tensor, directions: Tensor, num_aux_layers: int, seed: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """bfloat16 [n, K * H] and [n, H] of one document.

    Args:
        ids: int64 [n].
        directions: float32 [W, H], of root mean square one, that the norm turns into head rows.
        seed: of the noise.
    """
    first, second = seed
    generator = torch.Generator().manual_seed(first * 1_000_003 + second)
    coming = torch.cat((ids, ids[:1], ids[:1]))  # what follows the end is anything
    last = _LOUDNESS * directions[coming[1 : len(ids) + 1]]
    shape = (len(ids), num_aux_layers, directions.shape[1])
    noise = torch.randn(shape, generator=generator)
    hint = _HINT * directions[coming[2 : len(ids) + 2]]
    aux = (noise + hint[:, None]).flatten(1)
    return aux.bfloat16(), last.bfloat16()
