"""Queries, keys and values of every TTT step, from token embeddings and hidden states.

The projections read ``cat(embedding, hidden)``, so each weight has an embedding half and a hidden
half, and a product is the sum of two::

    W cat(e, h) = W_e e + W_h h

The tokens of step s are those of step 0, s rows further on. ``EmbeddingHalf.once`` therefore makes
``W_e e`` once a pack and shifts it; ``each_step`` multiplies the whole at every step. Rotary
embedding comes after the sum, at the position of the step.

At step 0 every row gives a key and a value, since later rows attend to it, but only the computed
rows ask. At later steps a row's key and value are for itself alone, so only the computed rows have
any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from eagle3.data.batch import PackedBatch
from eagle3.dims import Computed, Hidden
from eagle3.model.drafter import Drafter
from eagle3.names import EmbeddingHalf


@dataclass(frozen=True)
class QueryKeyValue:
    """One step's attention inputs, rotary embedding applied."""

    query: Tensor
    """[A, Hq, D]"""
    key: Tensor
    """[L, Hkv, D] at step 0, [A, Hkv, D] later, as ``value``."""
    value: Tensor


class StepProducts(Protocol):
    """Multiplies the projections of one step."""

    def __call__(self, step: int, normed: Hidden) -> tuple[Tensor, Tensor, Tensor]:
        """Flat query [A, Hq * D], key and value [L or A, Hkv * D] of normed states [L or A, H]."""
        ...


class Projection:
    """Attention inputs of the steps of one pack.

    Args:
        rows: the A computed rows, increasing; None: all rows.
    """

    def __init__(
        self,
        drafter: Drafter,
        batch: PackedBatch,
        rows: Int[Tensor, " A"] | None,
        ttt_steps: int,
        embedding_half: EmbeddingHalf,
    ) -> None:
        self._drafter, self._positions = drafter, batch.position_ids
        self._rows = _Rows(rows, len(batch), ttt_steps, batch.position_ids.device)
        self._products = PRODUCTS[embedding_half](drafter, batch, self._rows)

    def __call__(self, step: int, hidden: Hidden) -> tuple[QueryKeyValue, Computed]:
        """Attention inputs of a step, and the residual [A, H].

        Args:
            hidden: [L, H] at step 0, [A, H] later.
        """
        layer = self._drafter.layer
        normed = layer.hidden_norm(hidden)
        residual = normed if layer.norms.norm_before_residual else hidden
        query, key, value = self._products(step, normed)
        positions = self._positions + step
        if step > 0:
            positions = self._rows.pick(positions)
        cos, sin = self._drafter.rope(positions)
        attn = layer.self_attn
        keys, values = attn.keys(key, cos, sin), attn.values(value)
        if step == 0:
            residual, cos, sin = (self._rows.pick(t) for t in (residual, cos, sin))
        return QueryKeyValue(attn.queries(query, cos, sin), keys, values), residual


class _Rows:
    """The computed rows among all L."""

    def __init__(
        self, rows: Tensor | None, length: int, ttt_steps: int, device: torch.device
    ) -> None:
        self._rows, self._last, self._steps = rows, max(length - 1, 0), ttt_steps
        self._all = torch.arange(length, device=device)

    def pick(self, everything: Tensor) -> Tensor:
        """[L, ...] -> [A, ...]."""
        return everything if self._rows is None else everything.index_select(0, self._rows)

    def at(self, step: int) -> Int[Tensor, " A"]:
        """Rows whose token the computed rows read at a step. Past the end: the last row, unused."""
        return (self.pick(self._all) + step).clamp(max=self._last)

    def reached(self) -> Int[Tensor, " B"]:
        """Rows that :meth:`at` names at some step, in increasing order."""
        reached = torch.zeros_like(self._all, dtype=torch.bool)
        for step in range(self._steps):
            reached[self.at(step)] = True
        return reached.nonzero()[:, 0]

    def places(self, among: Int[Tensor, " B"]) -> Int[Tensor, " L"]:
        """Where each row stands among these; anything for the others."""
        places = torch.zeros_like(self._all)
        places[among] = torch.arange(len(among), device=among.device)
        return places


class _EachStep:
    """The whole product at every step."""

    def __init__(self, drafter: Drafter, batch: PackedBatch, rows: _Rows) -> None:
        self._drafter, self._ids, self._rows = drafter, batch.input_ids, rows

    def __call__(self, step: int, normed: Hidden) -> tuple[Tensor, Tensor, Tensor]:
        attn = self._drafter.layer.self_attn
        ids = self._ids if step == 0 else self._ids[self._rows.at(step)]
        embeds = self._drafter.layer.input_layernorm(self._drafter.embed(ids))
        mixed = torch.cat((embeds.to(normed.dtype), normed), dim=-1)
        asking = self._rows.pick(mixed) if step == 0 else mixed
        return attn.q_proj(asking), attn.k_proj(mixed), attn.v_proj(mixed)


class _Once:
    """The embedding half at the start; at each step its rows are gathered.

    Every row gives a key and a value at step 0; queries read only the tokens of computed rows.
    """

    def __init__(self, drafter: Drafter, batch: PackedBatch, rows: _Rows) -> None:
        self._rows, attn = rows, drafter.layer.self_attn
        embeds = drafter.layer.input_layernorm(drafter.embed(batch.input_ids))
        weights = (attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight)
        halves = [_product_weight(weight).chunk(2, dim=1) for weight in weights]
        self._hidden_halves = [hidden_half for _, hidden_half in halves]
        reached = rows.reached()
        self._query_place = rows.places(reached)
        # Cast once: autocast would keep a copy for each of the three products.
        embeds = embeds.to(halves[0][0].dtype)
        asked = (embeds.index_select(0, reached), embeds, embeds)
        self._embedded = [F.linear(x, half) for x, (half, _) in zip(asked, halves, strict=True)]

    def __call__(self, step: int, normed: Hidden) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self._embedded
        weights = self._hidden_halves
        read = self._rows.at(step)
        asking = normed
        if step == 0:
            asking = self._rows.pick(normed)
        else:
            key, value = key.index_select(0, read), value.index_select(0, read)
        return (
            _sum(query.index_select(0, self._query_place[read]), asking, weights[0]),
            _sum(key, normed, weights[1]),
            _sum(value, normed, weights[2]),
        )


def _sum(embedded: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    """``embedded + hidden @ weight^T`` in one product."""
    return torch.addmm(embedded, hidden, weight.t())


def _product_weight(weight: Tensor) -> Tensor:
    """The weight in the dtype of products, cast once for all steps (autocast would at each)."""
    device = weight.device.type
    if weight.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return weight
    return weight.to(torch.get_autocast_dtype(device))


PRODUCTS: dict[EmbeddingHalf, Callable[[Drafter, PackedBatch, _Rows], StepProducts]] = {
    EmbeddingHalf.each_step: _EachStep,
    EmbeddingHalf.once: _Once,
}
