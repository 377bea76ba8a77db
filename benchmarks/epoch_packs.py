"""An epoch of documents packed to whole batches, as :class:`step_case.Piece` of each pack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from step_case import Piece

from eagle3.data.masks import Runs
from eagle3.data.packing import PackingRule, segment_documents
from eagle3.data.plan import training_plan
from eagle3.data.segments import Segment
from eagle3.names import LongDocuments
from eagle3.tokens import asset_path, read_token_file

RECORDED_LENGTHS = Path(__file__).parents[1] / "tests" / "golden" / "sampler_lengths.npz"
SEED, CONTEXT = 0, 128


@dataclass(frozen=True)
class Documents:
    """Lengths and prompts of a set of documents, in tokens, [D]."""

    lengths: NDArray[np.int64]
    prompts: NDArray[np.int64]


def packaged_answers() -> Documents:
    """The documents in the package."""
    sequences = read_token_file(asset_path())
    return Documents(
        np.array([len(sequence.ids) for sequence in sequences]),
        np.array([sequence.prompt_length for sequence in sequences]),
    )


def long_documents() -> Documents:
    """Log-normal lengths from the goldens; the share of the prompt is drawn."""
    with np.load(RECORDED_LENGTHS) as file:
        lengths = file["lengths.37312"].astype(np.int64)
    shares = np.random.default_rng(SEED).uniform(0.1, 0.9, len(lengths))
    return Documents(lengths, (lengths * shares).astype(np.int64))


def split_packs(documents: Documents, max_seq_len: int, ttt_steps: int) -> list[list[Piece]]:
    """The epoch as we pack it, on one rank."""
    lengths, prompts = documents.lengths, documents.prompts
    gates = Runs(np.arange(len(lengths) + 1), np.stack([prompts - 1, lengths - 1], axis=1))
    rule = PackingRule(max_seq_len, LongDocuments.split, CONTEXT, ttt_steps)
    segmentation = segment_documents(np.arange(len(lengths)), lengths, gates, rule)
    plan = training_plan(segmentation.segments, max_seq_len, SEED, 0, 1, 1)
    return [
        [piece_of(segment, int(prompts[segment.document])) for segment in pack]
        for pack in plan.packs
    ]


def piece_of(segment: Segment, prompt: int) -> Piece:
    """``prompt`` tokens of the document gate no row: row i is gated by token i + 1."""
    return Piece(
        rows=segment.rows,
        prompt_rows=min(max(prompt - 1 - segment.start, 0), segment.rows),
        own_start=segment.own_start - segment.start,
        own_stop=segment.own_stop - segment.start,
    )


def truncated_pieces(documents: Documents, max_seq_len: int) -> list[Piece]:
    """What is left of each document when it is cut to ``max_seq_len`` rows, [D]."""
    rows = np.minimum(documents.lengths - 1, max_seq_len)
    prompts = np.minimum(documents.prompts - 1, rows)
    pairs = zip(rows.tolist(), prompts.tolist(), strict=True)
    return [Piece(count, prompt, 0, count) for count, prompt in pairs]


def spread(packs: list[list[Piece]], count: int) -> list[list[Piece]]:
    """``count`` packs in the middle of equal parts of all, sorted by supervised rows."""
    by_size = sorted(packs, key=supervised)
    return [by_size[int((part + 0.5) * len(packs) / count)] for part in range(count)]


def supervised(pack: Sequence[Piece]) -> int:
    """Gated rows in which a chain starts."""
    return sum(max(p.own_stop - max(p.own_start, p.prompt_rows), 0) for p in pack)
