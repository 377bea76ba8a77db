"""Tiny drafters, verifier heads and packs for tests; everything random is seeded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eagle3.config import ComputeConfig, ModelConfig, RopeConfig
from eagle3.data.batch import PackedBatch
from eagle3.model.drafter import Drafter
from eagle3.model.layers import NormLayout
from eagle3.model.verifier_head import VerifierHead
from eagle3.names import LastHidden
from eagle3.objective import PackResult, row_counts, run_pack, step_weights

TINY = ModelConfig(
    hidden_size=32,
    vocab_size=50,
    draft_vocab_size=20,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_aux_layers=3,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=100.0),
)


@dataclass(frozen=True)
class Document:
    """One captured document: n tokens with their states."""

    input_ids: Tensor
    loss_mask: Tensor
    aux_hidden: Tensor
    last_hidden: Tensor

    def __len__(self) -> int:
        return self.input_ids.shape[0]


def make_document(
    length: int,
    seed: int,
    config: ModelConfig = TINY,
    *,
    mask: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Document:
    """Random tokens and states; ``mask`` defaults to a prompt of a third, then the answer."""
    generator = torch.Generator().manual_seed(seed)
    gates = mask if mask is not None else [int(i >= length // 3) for i in range(length)]
    width = config.num_aux_layers * config.hidden_size
    return Document(
        input_ids=torch.randint(0, config.vocab_size, (length,), generator=generator),
        loss_mask=torch.tensor(gates, dtype=torch.bool),
        aux_hidden=torch.randn(length, width, generator=generator).to(dtype),
        last_hidden=torch.randn(length, config.hidden_size, generator=generator).to(dtype),
    )


def pack(documents: Sequence[Document], padding: int = 0) -> PackedBatch:
    """Lay whole documents end to end; written apart from the package's own collation."""
    parts: dict[str, list[Tensor]] = {
        name: []
        for name in (
            "input_ids",
            "next_ids",
            "aux_hidden",
            "last_hidden",
            "loss_mask",
            "document_ids",
            "position_ids",
            "start_mask",
        )
    }
    for index, doc in enumerate(documents):
        rows = len(doc) - 1
        parts["input_ids"].append(doc.input_ids[1:])
        parts["next_ids"].append(torch.cat((doc.input_ids[2:], torch.tensor([-1]))))
        parts["aux_hidden"].append(doc.aux_hidden[:-1])
        parts["last_hidden"].append(doc.last_hidden[1:])
        parts["loss_mask"].append(doc.loss_mask[1:])
        parts["document_ids"].append(torch.full((rows,), index))
        parts["position_ids"].append(torch.arange(rows))
        parts["start_mask"].append(torch.ones(rows, dtype=torch.bool))
    fill: dict[str, Any] = {"next_ids": -1, "document_ids": -1}
    tensors = {}
    for name, pieces in parts.items():
        joined = torch.cat(pieces)
        pad = torch.full((padding, *joined.shape[1:]), fill.get(name, 0), dtype=joined.dtype)
        tensors[name] = torch.cat((joined, pad))
    return PackedBatch(**tensors, document_lengths=tuple(len(doc) for doc in documents))


def tiny_drafter(
    config: ModelConfig = TINY,
    *,
    norms: NormLayout | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Drafter:
    """A drafter whose every weight is random, norms included."""
    generator = torch.Generator().manual_seed(seed)
    drafter = Drafter(config, norms)
    drafter.init_weights(generator)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.25 * torch.randn(parameter.shape, generator=generator))
    drafter.embed_tokens = torch.randn(config.vocab_size, config.hidden_size, generator=generator)
    selected = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size]
    selected = selected.sort().values
    drafter.d2t = selected - torch.arange(config.draft_vocab_size)
    drafter.t2d[selected] = True
    return drafter.to(dtype)


def tiny_head(
    config: ModelConfig = TINY, *, seed: int = 1, dtype: torch.dtype = torch.float32
) -> VerifierHead:
    """A verifier head on the draft vocabulary with a norm gain away from one."""
    generator = torch.Generator().manual_seed(seed)
    gain = 1 + 0.5 * torch.randn(config.hidden_size, generator=generator)
    weight = torch.randn(config.draft_vocab_size, config.hidden_size, generator=generator)
    return VerifierHead(
        gain.to(dtype),
        weight.to(dtype),
        eps=config.rms_norm_eps,
        last_hidden=LastHidden.pre_norm,
    )


def judge(
    drafter: Drafter,
    head: VerifierHead,
    batch: PackedBatch,
    *,
    ttt_steps: int,
    mix: Sequence[tuple[str, float]] = (("kl", 1.0),),
    compute: ComputeConfig = ComputeConfig(),  # noqa: B008 - frozen
    counts: Tensor | None = None,
    step_loss_decay: float = 1.0,
) -> PackResult:
    """One pack as a whole window of one rank; ``counts`` None: its own."""
    if counts is None:
        counts = row_counts([batch], ttt_steps)
    return run_pack(
        drafter,
        head,
        batch,
        batch.aux_hidden,
        ttt_steps=ttt_steps,
        mix=mix,
        compute=compute,
        weights=step_weights(counts, step_loss_decay=step_loss_decay, world_size=1),
        with_overlap=True,
    )


def with_garbage_padding(batch: PackedBatch, value: float) -> PackedBatch:
    """Fill the hidden states of padding rows with ``value`` (inf, nan)."""
    padding = batch.document_ids < 0
    aux, last = batch.aux_hidden.clone(), batch.last_hidden.clone()
    aux[padding], last[padding] = value, value
    return replace(batch, aux_hidden=aux, last_hidden=last)
