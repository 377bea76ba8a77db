"""A Hugging Face model in this process: hidden states by one prefill, and answers.

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
from eagle3.names import LastHidden
from eagle3.verifier.base import (
    CapturedStates,
    Sampling,
    VerifierDescription,
    describe_verifier,
    require_extra,
)
from eagle3.verifier.states import StatesOffer, dtype_name


class HuggingFaceVerifier:
    """A decoder-only model loaded by transformers, from a local directory only."""

    def __init__(
        self,
        directory: Path,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Load the model.

        Args:
            directory: Holds ``config.json`` and ``*.safetensors``. No code from it is run.
            dtype: Of weights and computation. On CPU float32 is the fastest as measured.
            device: Where to run.

        Raises:
            VerifierError: transformers is missing, the directory is not a model's, or the model
                has no list of ``layers`` with a final ``norm``.
        """
        self._description = describe_verifier(directory)
        self.device = torch.device(device)
        self.model = _load(directory, dtype)
        self.model.eval().requires_grad_(False).to(self.device)
        self.decoder = self.model.base_model
        self._layers, self._norm = _find_layers(self.decoder, directory)
        self.offer = _offer(self.model, self._description, dtype, len(self._layers))

    def describe(self) -> VerifierDescription:
        """Identity and sizes."""
        return self._description

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, as the model's files say; a model may have several."""
        return tuple(_end_ids(self.model))

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
        with self.recorded({*aux_layer_ids, last_id}) as states:
            self.decoder(padded.to(self.device), use_cache=False)
        return [
            CapturedStates(
                aux=tuple(states[k][row, : len(ids)] for k in aux_layer_ids),
                last=states[last_id][row, : len(ids)],
            )
            for row, ids in enumerate(token_ids)
        ]

    @torch.inference_mode()
    def logits(self, token_ids: Tensor) -> Tensor:
        """The model's own logits of one document, [n, V] float32, to check states against.

        Raises:
            VerifierError: the directory holds a model without a head.
        """
        self._require_head()
        self._check([token_ids], [])
        output = self.model(token_ids[None].to(self.device), use_cache=False)
        return output.logits[0].float()

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Tensor], sampling: Sampling) -> list[Tensor]:
        """See :class:`eagle3.verifier.base.Generator`.

        Raises:
            VerifierError: a model without a head, or a token outside the vocabulary.
        """
        self._require_head()
        self._check(prompts, [])
        from transformers import GenerationConfig

        ends = _end_ids(self.model)
        options = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            do_sample=sampling.temperature > 0,
            eos_token_id=ends or None,
            pad_token_id=ends[0] if ends else 0,
            bos_token_id=None,
            **_sampling_options(sampling),
        )
        ids, present = _padded_left(prompts)
        kept = self.model.generation_config
        # What the model's files say would fill every option that is left out here.
        self.model.generation_config = GenerationConfig()
        try:
            with torch.random.fork_rng([] if self.device.type == "cpu" else [self.device]):
                torch.manual_seed(sampling.seed)
                written = self.model.generate(
                    ids.to(self.device),
                    attention_mask=present.to(self.device),
                    generation_config=options,
                )
        finally:
            self.model.generation_config = kept
        return [_until_end(row, ends) for row in written[:, ids.shape[1] :].cpu()]

    def _require_head(self) -> None:
        if not hasattr(self.model, "lm_head"):
            raise VerifierError(
                f"{self._description.name}: {type(self.model).__name__} has no lm_head, expected a "
                "language model with its head. Name its class under 'architectures' in config.json."
            )

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
    def recorded(self, layer_ids: set[int]) -> Iterator[dict[int, Tensor]]:
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


def _load(directory: Path, dtype: torch.dtype) -> Any:
    """The class that config.json names, which has the head too; else the decoder alone."""
    require_extra("transformers")
    import transformers
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # ours are plain lines
    config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    base = transformers.PreTrainedModel
    known = [each for each in named if isinstance(each, type) and issubclass(each, base)]
    loader: Any = known[0] if known else transformers.AutoModel
    return loader.from_pretrained(
        directory, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    )


def _offer(
    model: Any, description: VerifierDescription, dtype: torch.dtype, num_layers: int
) -> StatesOffer:
    import transformers

    quantization = getattr(model.config, "quantization_config", None)
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    return StatesOffer(
        engine="transformers",
        version=str(transformers.__version__),
        form="prefill in this process",
        model=description.name,
        dtype=dtype_name(dtype),
        quantization=None if method is None else str(getattr(method, "quant_method", method)),
        aux_layer_ids=tuple(range(num_layers + 1)),
        server_layer_ids=None,
        last_hidden=LastHidden.pre_norm,
    )


def _sampling_options(sampling: Sampling) -> dict[str, Any]:
    """Greedy generation takes none of them, and transformers warns of those it does not take."""
    if sampling.temperature == 0:
        return {}
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
    }


def _end_ids(model: Any) -> list[int]:
    found = model.generation_config.eos_token_id
    found = model.config.eos_token_id if found is None else found
    return [found] if isinstance(found, int) else list(found or ())


def _padded_left(prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Ids and the mask of those that are there, int64 [B, longest]: answers begin in one column."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    present = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        present[row, longest - len(prompt) :] = 1
    return ids, present


def _until_end(ids: Tensor, ends: Sequence[int]) -> Tensor:
    """``ids`` up to the first end of sequence, that one included."""
    places = torch.isin(ids, torch.tensor(ends, dtype=ids.dtype)).nonzero()
    return ids if not len(places) else ids[: int(places[0]) + 1]


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
