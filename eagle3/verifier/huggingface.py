"""Hidden states of a Hugging Face model by one prefill.

Where the states are taken, for a model of n layers::

    embed -> [0] -> layer 0 -> [1] -> layer 1 -> ... -> layer n-1 -> [n] -> final norm -> lm_head

Id k is the residual stream at [k], entering layer k; it is what transformers calls
``hidden_states[k]`` for k < n. Transformers' last entry is taken after the final norm, ours at [n]
is before it.

What makes it cheap, without changing a result: the decoder is run without ``lm_head``, only the
states asked for are kept, and documents are padded on the right. Under causal attention no token
sees a later one, so padding on the right cannot reach a document and no mask is needed, which
keeps the fast causal attention kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eagle3.errors import VerifierError
from eagle3.verifier.base import (
    CapturedStates,
    VerifierDescription,
    describe_verifier,
    require_extra,
)


class HuggingFaceVerifier:
    """A decoder-only model loaded by transformers, from a local directory only."""

    def __init__(
        self,
        directory: Path,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Load the decoder.

        Args:
            directory: Holds ``config.json`` and ``*.safetensors``. No code from it is run.
            dtype: Of weights and computation. On CPU float32 is the fastest as measured.
            device: Where to run.

        Raises:
            VerifierError: transformers is missing, the directory is not a model's, or the model
                has no list of ``layers`` with a final ``norm``.
        """
        self._description = describe_verifier(directory)
        require_extra("transformers")
        from transformers import AutoModel
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()  # ours are plain lines
        self.device = torch.device(device)
        self.decoder = AutoModel.from_pretrained(
            directory, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        )
        self.decoder.eval().requires_grad_(False).to(self.device)
        self._layers, self._norm = _find_layers(self.decoder, directory)

    def describe(self) -> VerifierDescription:
        """Identity and sizes."""
        return self._description

    @torch.inference_mode()
    def capture(
        self, token_ids: Sequence[Tensor], aux_layer_ids: Sequence[int]
    ) -> list[CapturedStates]:
        """Prefill a batch of documents at once.

        Args:
            token_ids: One int64 [n] tensor per document, n >= 1; like lengths waste the least.
            aux_layer_ids: Layers whose entering residual stream is returned, 0 to num_layers;
                num_layers means entering the final norm.

        Returns:
            States per document, views of the batch's tensors: the caller copies what it keeps.

        Raises:
            VerifierError: an id of a layer that is not there, or a token outside the vocabulary.
        """
        self._check(token_ids, aux_layer_ids)
        padded = nn.utils.rnn.pad_sequence(list(token_ids), batch_first=True)
        last_id = len(self._layers)
        with self._recorded({*aux_layer_ids, last_id}) as states:
            self.decoder(padded.to(self.device), use_cache=False)
        return [
            CapturedStates(
                aux=tuple(states[k][row, : len(ids)] for k in aux_layer_ids),
                last=states[last_id][row, : len(ids)],
            )
            for row, ids in enumerate(token_ids)
        ]

    def _check(self, token_ids: Sequence[Tensor], aux_layer_ids: Sequence[int]) -> None:
        wrong_layers = [k for k in aux_layer_ids if not 0 <= k <= len(self._layers)]
        if wrong_layers:
            raise VerifierError(
                f"{self._description.name}: aux_layer_ids {wrong_layers} are not layers of it. "
                f"Expected 0 to {len(self._layers)}: id k is the state entering layer k."
            )
        for index, ids in enumerate(token_ids):
            if len(ids) == 0 or ids.min() < 0 or ids.max() >= self._description.vocab_size:
                span = f"ids from {ids.min()} to {ids.max()}" if len(ids) else "no ids"
                raise VerifierError(
                    f"{self._description.name}: document {index} of the batch has {span}. Expected "
                    f"at least one id, all from 0 to {self._description.vocab_size - 1}."
                )

    @contextmanager
    def _recorded(self, layer_ids: set[int]) -> Iterator[dict[int, Tensor]]:
        states: dict[int, Tensor] = {}
        modules = [*self._layers, self._norm]

        def hook_for(layer_id: int) -> Any:
            def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                states[layer_id] = args[0] if args else kwargs["hidden_states"]

            return keep

        handles = [
            modules[k].register_forward_pre_hook(hook_for(k), with_kwargs=True) for k in layer_ids
        ]
        try:
            yield states
        finally:
            for handle in handles:
                handle.remove()


def _find_layers(decoder: nn.Module, directory: Path) -> tuple[nn.ModuleList, nn.Module]:
    """The decoder layers and final norm, also of a language model inside a multimodal one."""
    for module in (decoder, getattr(decoder, "language_model", None)):
        layers, norm = getattr(module, "layers", None), getattr(module, "norm", None)
        if isinstance(layers, nn.ModuleList) and isinstance(norm, nn.Module):
            return layers, norm
    raise VerifierError(
        f"{directory}: {type(decoder).__name__} has no 'layers' with a 'norm' after them, found "
        f"{[name for name, _ in decoder.named_children()]}. Expected a decoder-only language model."
    )
