"""A few validation rows to read: what was drafted, and what the verifier would have said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from eagle3.data.batch import PackedBatch
from eagle3.metrics import chain_results
from eagle3.objective import StepResult
from eagle3.token_text import Decode

COUNT = 16
_CONTEXT_TOKENS = 12


@dataclass(frozen=True)
class Example:
    """One round of drafting; token ids of the verifier."""

    context: tuple[int, ...]
    """The last tokens before the draft."""
    verifier: tuple[int, ...]
    draft: tuple[int, ...]
    accepted: int
    """Leading draft tokens that are the verifier's."""
    source: str = ""
    """Label of where the document came from; empty: the batch does not say."""


def pick_examples(
    batch: PackedBatch, results: Sequence[StepResult], d2t: Int[Tensor, " V"], count: int = COUNT
) -> list[Example]:
    """Evenly spaced rounds of a trimmed pack whose every step has a gate; always the same rows."""
    chain = chain_results(batch, results)
    rows = chain.gated.all(dim=1).nonzero()[:, 0]
    if not len(rows):
        return []
    places = torch.linspace(0, len(rows) - 1, min(count, len(rows))).long().to(rows.device)
    chosen = rows[places]
    draft, verifier = (
        torch.stack([_tokens_at(r, chosen, best(r), d2t) for r in results], dim=1)
        for best in (lambda r: r.draft_best, lambda r: r.verifier_best)
    )
    return [
        Example(
            context=_context(batch, row),
            verifier=tuple(verifier[index].tolist()),
            draft=tuple(draft[index].tolist()),
            accepted=int(chain.accepted[row].sum()),
            source=_source(batch, row),
        )
        for index, row in enumerate(chosen.tolist())
    ]


def _tokens_at(result: StepResult, rows: Tensor, draft_ids: Tensor, d2t: Tensor) -> Tensor:
    """Verifier ids of one step's best tokens at these start rows."""
    places = torch.searchsorted(result.rows.starts, rows)
    ids = draft_ids[places]
    return ids + d2t[ids]


def _context(batch: PackedBatch, row: int) -> tuple[int, ...]:
    first = int(torch.searchsorted(batch.document_ids, batch.document_ids[row]))
    return tuple(batch.input_ids[max(first, row + 1 - _CONTEXT_TOKENS) : row + 1].tolist())


def _source(batch: PackedBatch, row: int) -> str:
    return batch.document_sources[int(batch.document_ids[row])] if batch.document_sources else ""


def table(examples: Sequence[Example], decode: Decode) -> tuple[list[str], list[list[str | int]]]:
    """Columns and rows, for a dashboard or a file."""
    columns = ["context", "verifier", "draft", "accepted", "source"]
    return columns, [
        [decode(e.context), decode(e.verifier), decode(e.draft), e.accepted, e.source]
        for e in examples
    ]
