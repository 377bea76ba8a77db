"""The drafter beside a verifier: its own cache, real rows first, then a chain of drafts.

For a sequence whose tokens x_0..x_4 are known and whose states g_0..g_3 are, as alignment goes
(DESIGN: row i reads x_{i+1} and g_i)::

    place      0       1       2       3       4           5
    token      x1      x2      x3      x4      draft 1     draft 2
    feature    fc(g0)  fc(g1)  fc(g2)  fc(g3)  output      output of place 4
                                       |       of place 3
                                       +-> draft 1 --^ +-> draft 2 --^ ...

Places of drafts are overwritten by the real rows of the next round, with the states that the
verifier has given meanwhile, as servers do it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from eagle3.decoding.key_values import KeyValues, visible
from eagle3.model.drafter import Drafter


class DraftSession:
    """Drafts for B sequences."""

    def __init__(self, drafter: Drafter, rows: int, capacity: int) -> None:
        """``capacity``: tokens of a sequence, those drafted in vain included."""
        self._drafter = drafter
        self._cache = KeyValues(capacity)
        device = drafter.fc.weight.device
        self._lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self._drafted = 0
        self._output = drafter.fc.weight.new_empty(rows, drafter.config.hidden_size)

    @torch.inference_mode()
    def extend(
        self,
        tokens: Int[Tensor, "B n"],
        aux_hidden: Float[Tensor, "B n KH"],
        counts: Int[Tensor, " B"],
    ) -> None:
        """Append real rows.

        Args:
            tokens: verifier ids, x_{i+1} of row i; of sequence b the first ``counts[b]`` count.
            aux_hidden: states g_i of row i, in any floating dtype.
            counts: at least 1 each.
        """
        weight = self._drafter.fc.weight
        features = self._drafter.fuse(aux_hidden.flatten(0, 1).to(weight.device, weight.dtype))
        output = self._layer(tokens.to(weight.device), features, 0)
        counts = counts.to(weight.device)
        rows = torch.arange(len(counts), device=weight.device)
        self._output = output[rows, counts - 1]
        self._lengths = self._lengths + counts
        self._drafted = 0

    @torch.inference_mode()
    def logits(self) -> Float[Tensor, "B V"]:
        """Of the next draft."""
        return self._drafter.logits(self._output)

    @torch.inference_mode()
    def feed(self, tokens: Int[Tensor, " B"]) -> None:
        """Take the drafts as read (verifier ids), for the one after them."""
        features = self._drafter.feedback(self._output)
        tokens = tokens.to(features.device)
        self._output = self._layer(tokens[:, None], features, self._drafted)[:, 0]
        self._drafted += 1

    def select(self, rows: Int[Tensor, " R"]) -> None:
        """Go on with these sequences only."""
        rows = rows.to(self._lengths.device)
        self._lengths, self._output = self._lengths[rows], self._output[rows]
        self._cache.select(rows)

    def _layer(self, tokens: Tensor, features: Tensor, after: int) -> Tensor:
        """The layer's output [B, n, H] for tokens [B, n] with features [B * n, H], written from
        ``after`` places behind the real rows on."""
        layer, config = self._drafter.layer, self._drafter.config
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        places = self._lengths[:, None] + after + steps
        stop = int(places.max()) + 1
        normed = layer.hidden_norm(features)
        embeds = layer.input_layernorm(self._drafter.embed(tokens.flatten()))
        mixed = torch.cat((embeds, normed), dim=-1)
        cos, sin = self._drafter.rope(places.flatten())
        attn = layer.self_attn

        def by_sequence(heads: Tensor) -> Tensor:
            """[B * n, heads, D] -> [B, heads, n, D]"""
            return heads.unflatten(0, tokens.shape).transpose(1, 2)

        keys, values = self._cache.put(
            by_sequence(attn.keys(attn.k_proj(mixed), cos, sin)),
            by_sequence(attn.values(attn.v_proj(mixed))),
            places,
            stop,
        )
        attended = F.scaled_dot_product_attention(
            by_sequence(attn.queries(attn.q_proj(mixed), cos, sin)),
            keys,
            values,
            attn_mask=visible(places, stop, config.sliding_window),
            enable_gqa=config.num_key_value_heads != config.num_attention_heads,
        )
        residual = normed if layer.norms.norm_before_residual else features
        flat = layer.finish(attended.transpose(1, 2).flatten(0, 1), residual)
        return flat.unflatten(0, tokens.shape)
