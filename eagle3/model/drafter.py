"""The drafter: fuse aux states once, then one decoder layer, final norm and draft head per step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from eagle3.config import ModelConfig
from eagle3.dims import AuxHidden, Hidden, Logits
from eagle3.model.layers import DecoderLayer, NormLayout, RMSNorm
from eagle3.model.rope import Rope
from eagle3.model.scope import Head, Scope


class Drafter(Scope):
    """Trainable ``fc``, ``layer``, ``norm``, ``lm_head``; frozen ``embed_tokens``.

    ``embed_tokens`` [W, H], ``d2t`` [V] and ``t2d`` [W] are buffers: no optimizer, no gradient
    bucket sees them. The embedding, which the verifier holds anyway, is not saved.
    """

    embed_tokens: Tensor
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: ModelConfig, norms: NormLayout | None = None) -> None:
        super().__init__()
        self.config = config
        self.norms = norms or NormLayout.preset(config.norm_layout)
        size, width, eps = config.hidden_size, config.num_aux_layers, config.rms_norm_eps
        self.register_buffer("embed_tokens", torch.empty(config.vocab_size, size), persistent=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.input_norm = RMSNorm(width * size, eps) if self.norms.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(RMSNorm(size, eps) for _ in range(width)) if self.norms.fc_norm else None
        )
        self.fc = nn.Linear(width * size, size, bias=False)
        self.layer = DecoderLayer(config, self.norms)
        self.norm = RMSNorm(size, eps)
        self.lm_head = Head(size, config.draft_vocab_size, bias=False)
        self.lm_head.weight.requires_grad_(config.lm_head_trainable)
        self.rope = Rope(config.rope, config.head_dim)

    def fuse(self, aux_hidden: AuxHidden) -> Hidden:
        """Aux states [T, K*H] -> the hidden state of step 0 [T, H]; once per row."""
        if self.input_norm is not None:
            aux_hidden = self.input_norm(aux_hidden)
        if self.fc_norm is not None:
            parts = aux_hidden.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            aux_hidden = torch.cat(normed, dim=-1)
        return self.fc(aux_hidden)

    def embed(self, input_ids: Int[Tensor, " T"]) -> Hidden:
        """Frozen token embeddings in the parameters' dtype."""
        return F.embedding(input_ids, self.embed_tokens).to(self.fc.weight.dtype)

    def feedback(self, hidden: Hidden) -> Hidden:
        """What the next step reads: the layer's output, before the final norm unless told."""
        return self.norm(hidden) if self.norms.norm_output else hidden

    def logits(self, hidden: Float[Tensor, "R H"]) -> Logits:
        """Draft logits [R, V] of layer outputs [R, H]."""
        return self.lm_head(self.norm(hidden))

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Random matrices with variance 1 / (3 fan-in); norms stay at one."""
        for parameter in self.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, (3 * parameter.shape[1]) ** -0.5, generator=generator)
