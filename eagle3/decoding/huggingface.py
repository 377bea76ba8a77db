"""A Hugging Face model as the verifier of speculative decoding."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from eagle3.decoding.key_values import KeyValues, Places, visible
from eagle3.decoding.verifier import Pass
from eagle3.errors import VerifierError
from eagle3.verifier.huggingface import HuggingFaceVerifier

_FULL = "full_attention"


class HuggingFaceDecoding:
    """Decodes with the model of a :class:`HuggingFaceVerifier`, which is not changed."""

    def __init__(self, verifier: HuggingFaceVerifier, aux_layer_ids: Sequence[int] = ()) -> None:
        """``aux_layer_ids``: states to hand out, id k is the state entering layer k.

        Raises:
            VerifierError: a model whose attention is not full causal attention in every layer.
        """
        self._verifier, self._layers = verifier, tuple(aux_layer_ids)
        config = verifier.model.config.get_text_config()
        self._num_layers = int(config.num_hidden_layers)
        self._limit = int(getattr(config, "max_position_embeddings", 0)) or None
        other = sorted(set(getattr(config, "layer_types", None) or ()) - {_FULL})
        if other:
            raise VerifierError(
                f"{verifier.describe().name}: found layers of {', '.join(other)}, expected full "
                "attention everywhere: its cache cannot take back rejected drafts here. Measure "
                "on a server instead (server=URL)"
            )
        # transformers calls the argument past_key_values before 5.24
        names = inspect.signature(verifier.model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, as the model's files say."""
        return self._verifier.end_ids

    def begin(self, prompts: Sequence[Tensor], room: int) -> tuple[HuggingFaceSession, Pass]:
        """See :meth:`eagle3.decoding.verifier.DecodingVerifier.begin`.

        Raises:
            VerifierError: a prompt that leaves no room within the model's positions.
        """
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        longest = int(lengths.max())
        if self._limit is not None and longest + room > self._limit:
            raise VerifierError(
                f"{self._verifier.describe().name}: found a prompt of {longest:,} tokens and "
                f"{room:,} to follow, expected at most {self._limit:,} positions in all: leave "
                "long prompts out, or ask for shorter answers"
            )
        session = HuggingFaceSession(self, longest + room, len(prompts))
        padded = nn.utils.rnn.pad_sequence(list(prompts), batch_first=True)
        ends, place = torch.unique(lengths - 1, return_inverse=True)
        found = session.run(padded, keep=ends)
        session.advance(lengths)
        rows = torch.arange(len(prompts), device=found.logits.device)
        last = found.logits[rows, place.to(rows.device)]
        return session, Pass(last[:, None], found.aux_hidden)

    @torch.inference_mode()
    def run(
        self, tokens: Tensor, places: Places, stop: int, cache: Any, keep: Tensor | int
    ) -> Pass:
        """One pass of the model over ``tokens`` [B, n] at ``places``."""
        device = self._verifier.device
        with self._verifier.recorded(set(self._layers)) as states:
            output = self._verifier.model(
                input_ids=tokens.to(device),
                attention_mask=visible(places, stop),
                position_ids=places,
                use_cache=True,
                logits_to_keep=keep,
                **{self._cache_name: cache},
            )
        aux = [states[layer] for layer in self._layers]
        hidden = torch.cat(aux, dim=-1) if aux else output.logits.new_zeros(*tokens.shape, 0)
        return Pass(output.logits, hidden)

    def new_cache(self, capacity: int) -> RowsCache:
        """An empty cache for all layers."""
        return RowsCache(self._num_layers, capacity)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._verifier.device


class HuggingFaceSession:
    """See :class:`eagle3.decoding.verifier.Session`."""

    def __init__(self, verifier: HuggingFaceDecoding, capacity: int, rows: int) -> None:
        """``capacity``: places of a sequence."""
        self._verifier = verifier
        self._cache = verifier.new_cache(capacity)
        self._lengths = torch.zeros(rows, dtype=torch.int64, device=verifier.device)

    def forward(self, tokens: Tensor) -> Pass:
        """Feed ``tokens`` [B, n]."""
        return self.run(tokens, keep=0)

    def run(self, tokens: Tensor, keep: Tensor | int) -> Pass:
        """As :meth:`forward`, with logits after the tokens at the places ``keep``; 0: all."""
        steps = torch.arange(tokens.shape[1], device=self._lengths.device)
        places = self._lengths[:, None] + steps
        stop = int(places.max()) + 1
        self._cache.begin(places, stop)
        return self._verifier.run(tokens, places, stop, self._cache, keep)

    def advance(self, counts: Tensor) -> None:
        """Keep the first ``counts`` [B] tokens of the last pass."""
        self._lengths = self._lengths + counts.to(self._lengths.device)

    def select(self, rows: Tensor) -> None:
        """Go on with these sequences only."""
        rows = rows.to(self._lengths.device)
        self._lengths = self._lengths[rows]
        self._cache.select(rows)


class RowsCache(Cache):
    """:class:`KeyValues` behind the interface that transformers' models write to."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        super().__init__(layers=[_Layer(capacity) for _ in range(num_layers)])

    def begin(self, places: Places, stop: int) -> None:
        """Say where the next pass writes, and up to where it reads."""
        for layer in self.layers:
            layer.places, layer.stop = places, stop

    def select(self, rows: Tensor) -> None:
        """Keep these sequences only."""
        for layer in self.layers:
            layer.rows.select(rows)


class _Layer(CacheLayerMixin):
    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.rows, self.capacity = KeyValues(capacity), capacity
        self.places: Tensor | None = None
        self.stop = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Memory comes with the first keys."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new ones, return all."""
        assert self.places is not None
        return self.rows.put(key_states, value_states, self.places, self.stop)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset; the mask is given, so nobody makes one of them."""
        return self.stop, 0

    def get_seq_length(self) -> int:
        """Places in use before the pass."""
        return 0 if self.places is None else int(self.places.min())

    def get_max_length(self) -> int:
        """Places of a sequence."""
        return self.capacity
