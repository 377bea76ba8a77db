"""A drafter, a verifier head and one pack of given sizes, all random and seeded, for benchmarks of
one training step.

A document is a masked prompt, then the answer, so that no loss reads past a document's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from measuring import Measurement, measure
from torch import Tensor

from eagle3.config import ModelConfig
from eagle3.data.batch import PackedBatch
from eagle3.model.drafter import Drafter
from eagle3.model.layers import NormLayout
from eagle3.model.verifier_head import VerifierHead
from eagle3.names import LastHidden

__all__ = [
    "Measurement",
    "Piece",
    "StepSizes",
    "build_case",
    "measure",
]

NORMS = NormLayout(norm_before_residual=True)
_LOGIT_SPREAD = 1.5
"""Standard deviation of the verifier's logits, about."""


@dataclass(frozen=True)
class Piece:
    """A document, or a segment of one, in a pack."""

    rows: int
    prompt_rows: int
    """The first rows, which gate no loss."""
    own_start: int
    own_stop: int
    """Chains start in these rows."""


@dataclass(frozen=True)
class StepSizes:
    """Sizes of one step."""

    hidden_size: int = 512
    intermediate_size: int = 1312
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    vocab_size: int = 16_384
    draft_vocab_size: int = 8192
    rows: int = 2048
    documents: int = 6
    masked: float = 0.5
    """Share of the rows that are prompt."""
    lm_head_trainable: bool = False

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """``documents`` of uneven size, the last one ``documents`` times as long as the first."""
        shares = range(self.documents + 1)
        ends = [self.rows * sum(shares[: n + 1]) // sum(shares) for n in shares]
        sizes = [end - start for start, end in pairwise(ends)]
        return tuple(Piece(size, round(size * self.masked), 0, size) for size in sizes)

    @property
    def model(self) -> ModelConfig:
        """The drafter of these sizes."""
        return ModelConfig(
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            draft_vocab_size=self.draft_vocab_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            lm_head_trainable=self.lm_head_trainable,
        )


def build_case(
    sizes: StepSizes,
    seed: int,
    pieces: Sequence[Piece] | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Drafter, VerifierHead, PackedBatch]:
    """On the CPU; the pack holds ``pieces``, or those of ``sizes``."""
    generator = torch.Generator().manual_seed(seed)
    config = sizes.model
    drafter = _random_drafter(config, generator)
    scale = _LOGIT_SPREAD * config.hidden_size**-0.5
    head = VerifierHead(
        1 + 0.25 * torch.randn(config.hidden_size, generator=generator),
        scale * torch.randn(config.draft_vocab_size, config.hidden_size, generator=generator),
        eps=config.rms_norm_eps,
        last_hidden=LastHidden.pre_norm,
    )
    batch = _random_batch(config, pieces or sizes.pieces, generator)
    states = {"aux_hidden": batch.aux_hidden.to(dtype), "last_hidden": batch.last_hidden.to(dtype)}
    return drafter.to(dtype), head.to(dtype), replace(batch, **states)


def _random_drafter(config: ModelConfig, generator: torch.Generator) -> Drafter:
    drafter = Drafter(config, NORMS)
    drafter.init_weights(generator)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.25 * torch.randn(parameter.shape, generator=generator))
    drafter.embed_tokens = torch.randn(config.vocab_size, config.hidden_size, generator=generator)
    chosen = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size]
    chosen = chosen.sort().values
    drafter.d2t = chosen - torch.arange(config.draft_vocab_size)
    drafter.t2d[chosen] = True
    return drafter


def _random_batch(
    config: ModelConfig, pieces: Sequence[Piece], generator: torch.Generator
) -> PackedBatch:
    """[T] rows without padding."""

    def joined(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts)

    positions = [torch.arange(piece.rows) for piece in pieces]
    places = list(zip(positions, pieces, strict=True))
    rows = sum(piece.rows for piece in pieces)
    ids = torch.randint(0, config.vocab_size, (rows + 1,), generator=generator)
    position_ids = joined(positions)
    next_ids = ids[1:].clone()
    next_ids[torch.tensor([piece.rows for piece in pieces]).cumsum(0) - 1] = -1
    states: dict[str, Any] = {
        "aux_hidden": torch.randn(
            rows, config.num_aux_layers * config.hidden_size, generator=generator
        ),
        "last_hidden": torch.randn(rows, config.hidden_size, generator=generator),
    }
    return PackedBatch(
        input_ids=ids[:-1],
        next_ids=next_ids,
        loss_mask=joined([at >= piece.prompt_rows for at, piece in places]),
        document_ids=joined([torch.full_like(at, n) for n, at in enumerate(positions)]),
        position_ids=position_ids,
        start_mask=joined(
            [(at >= piece.own_start) & (at < piece.own_stop) for at, piece in places]
        ),
        document_lengths=tuple(piece.rows + 1 for piece in pieces),
        **states,
    )
