"""A drafter driven the way a serving engine drives it: token by token, with a key/value cache.

Shares weights, norms and rotation with the drafter, and nothing of its unroll or its attention.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.data.vocab import VocabMap
from eagle3.model.drafter import Drafter
from eagle3.model.layers import rotate
from tests.helpers import Document


class Server:
    """One sequence's cache. ``feed`` appends to it, ``rollback`` forgets."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.positions: list[int] = []

    def feed(self, token: Tensor, hidden: Tensor, position: int) -> Tensor:
        """One token and one hidden state in, the layer's output out; the cache grows by one."""
        layer, config = self.drafter.layer, self.drafter.config
        attn = layer.self_attn
        normed = layer.hidden_norm(hidden)
        x = torch.cat((layer.input_layernorm(self.drafter.embed_tokens[token]), normed))
        cos, sin = self.drafter.rope(torch.tensor([position]))
        query = attn.q_norm(F.linear(x, attn.q_proj.weight).view(-1, config.head_dim))
        key = attn.k_norm(F.linear(x, attn.k_proj.weight).view(-1, config.head_dim))
        self.keys.append(rotate(key[None], cos, sin)[0])
        self.values.append(F.linear(x, attn.v_proj.weight).view(-1, config.head_dim))
        self.positions.append(position)
        attended = self._attend(rotate(query[None], cos, sin)[0], position)
        residual = normed if layer.norms.norm_before_residual else hidden
        middle = residual + F.linear(attended, attn.o_proj.weight)
        return middle + layer.mlp(layer.post_attention_layernorm(middle[None]))[0]

    def _attend(self, query: Tensor, position: int) -> Tensor:
        """``query`` [Hq, D] over the visible cache -> [Hq * D]."""
        config = self.drafter.config
        window = config.sliding_window
        seen = [i for i, p in enumerate(self.positions) if window is None or position - p < window]
        group = config.num_attention_heads // config.num_key_value_heads
        keys = torch.stack([self.keys[i] for i in seen]).repeat_interleave(group, dim=1)
        values = torch.stack([self.values[i] for i in seen]).repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,khd->hk", query, keys) / config.head_dim**0.5
        return torch.einsum("hk,khd->hd", scores.softmax(-1), values).flatten()

    def rollback(self, length: int) -> None:
        """Forget everything after the first ``length`` cache entries, as after a round."""
        del self.keys[length:], self.values[length:], self.positions[length:]


def draft_as_server(
    drafter: Drafter, document: Document, steps: int
) -> dict[tuple[int, int], Tensor]:
    """Logits by (row, step): prefill row by row, draft true tokens from each, roll back."""
    server, out = Server(drafter), {}
    fused = drafter.fuse(document.aux_hidden)
    for row in range(len(document) - 1):
        hidden = fused[row]
        for step in range(steps):
            if row + 1 + step >= len(document):
                break
            output = server.feed(document.input_ids[row + 1 + step], hidden, row + step)
            out[row, step] = drafter.logits(output[None])[0]
            hidden = drafter.feedback(output[None])[0]
        server.rollback(row + 1)
    return out


@torch.no_grad()
def decode_greedily(
    drafter: Drafter, vocab: VocabMap, document: Document, draft_steps: int
) -> tuple[int, int]:
    """Speculative decoding of a greedy document, with the drafter's own tokens.

    The verifier's answer is known, so acceptance is comparing tokens. The first answer token comes
    from the prefill; nothing is drafted after the last one. Returns (tokens emitted, rounds).
    """
    tokens, gates = document.input_ids, document.loss_mask.tolist()
    server, fused = Server(drafter), drafter.fuse(document.aux_hidden)
    emitted = rounds = row = 0
    while row + 2 < len(tokens):
        server.rollback(row)
        output = server.feed(tokens[row + 1], fused[row], row)
        if not (gates[row + 1] and gates[row + 2]):
            row += 1
            continue
        accepted = 0
        while True:
            drafted = vocab.to_verifier(drafter.logits(output[None])[0].argmax())
            place = row + 2 + accepted
            wanted = place < len(tokens) and gates[place] and int(tokens[place]) == int(drafted)
            if not wanted:
                break
            accepted += 1
            if accepted == draft_steps:
                break
            output = server.feed(drafted, drafter.feedback(output[None])[0], row + accepted)
        rounds += 1
        server.rollback(row + 1)
        step = accepted + 1
        for extra in range(1, step):
            if row + extra + 2 < len(tokens):
                server.feed(tokens[row + extra + 1], fused[row + extra], row + extra)
        left = _answer_left(gates, row + 2)
        emitted += min(step, left)
        row += min(step, left)
    return emitted, rounds


def _answer_left(gates: list[bool], place: int) -> int:
    """Answer tokens from ``place`` to the end of its turn."""
    end = place
    while end < len(gates) and gates[end]:
        end += 1
    return end - place
