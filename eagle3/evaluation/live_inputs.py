"""What live decoding needs: verifier, drafter and prompts, without any shard."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eagle3.config import Config
from eagle3.conversations.reading import read_conversations
from eagle3.conversations.template import ChatTemplate
from eagle3.data.declaration import convert_layer_ids
from eagle3.data.tokens import TokenDocument
from eagle3.decoding.huggingface import HuggingFaceDecoding
from eagle3.demo import prepare_verifier, source_paths
from eagle3.errors import ConfigError, DataError
from eagle3.evaluation.config import LiveConfig
from eagle3.model.build import build_drafter, check_sizes
from eagle3.model.drafter import Drafter
from eagle3.model.trained_head import TrainedHead, read_trained_head
from eagle3.model.warm_start import warm_start
from eagle3.model.weights import load_verifier_weights
from eagle3.names import CaptureSource, LayerIdConvention
from eagle3.tokens import read_token_file, spread_subset
from eagle3.verifier.huggingface import HuggingFaceVerifier


@dataclass(frozen=True, eq=False)
class LiveModels:
    """On one device, in one dtype."""

    verifier: HuggingFaceVerifier
    drafter: Drafter
    aux_layer_ids: tuple[int, ...]
    """*entering* convention."""

    @property
    def plain(self) -> HuggingFaceDecoding:
        """The verifier without states, which is what decodes without drafting."""
        return HuggingFaceDecoding(self.verifier)

    @property
    def drafted(self) -> HuggingFaceDecoding:
        """The verifier with the states that the drafter reads."""
        return HuggingFaceDecoding(self.verifier, self.aux_layer_ids)


def load_models(config: Config, live: LiveConfig) -> LiveModels:
    """The verifier of ``paths.verifier`` and the drafter of ``paths.init``.

    Raises:
        ConfigError: no verifier, or nobody says which layers the drafter reads.
        DataError, VerifierError: a file that is missing or damaged.
    """
    assert config.paths.init is not None
    head = read_trained_head(Path(config.paths.init))
    layers = _layers(head, config)
    prepare_verifier(config)
    directory = verifier_directory(config)
    dtype: torch.dtype = getattr(torch, live.dtype)
    weights = load_verifier_weights(directory, dtype)
    check_sizes(config.model, weights.config)
    drafter = build_drafter(
        config.model, head.vocab_map(config.model.vocab_size), weights, config.seed
    )
    warm_start(drafter, head, weights)
    device = choose_device(live.device)
    return LiveModels(
        HuggingFaceVerifier(directory, dtype, device), prepared(drafter, dtype, device), layers
    )


def verifier_directory(config: Config) -> Path:
    """``paths.verifier``, or that of the demo, which a run of it has made.

    Raises:
        ConfigError: neither.
    """
    if config.paths.verifier is not None:
        return Path(config.paths.verifier)
    if config.capture.source is CaptureSource.off:
        raise ConfigError("found no paths.verifier, expected paths.verifier=DIR of the verifier")
    return source_paths(config).verifier


def prepared(drafter: Drafter, dtype: torch.dtype, device: torch.device) -> Drafter:
    """Frozen, with weights in ``dtype``; rotary frequencies stay float32."""
    drafter.requires_grad_(False).to(device)
    for parameter in drafter.parameters():
        parameter.data = parameter.data.to(dtype)
    return drafter


def choose_device(name: str) -> torch.device:
    """``auto`` is a GPU where there is one.

    Raises:
        ConfigError: no name of a device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"live.device={name}: expected auto, cpu, cuda or cuda:N") from error


def file_prompts(path: Path, verifier: Path, live: LiveConfig) -> list[Tensor]:
    """Token ids of the prompts in a file, int64 [n] each.

    A conversation ends before its last answer. A token file (:mod:`eagle3.tokens`) is known by
    ``ids`` in its first line.

    Raises:
        DataError: the file cannot be read, or ``live.num_prompts`` is more than it holds.
    """
    if _is_token_file(path):
        sequences = spread_subset(read_token_file(path), live.num_prompts, live.seed)
        return [torch.tensor(each.ids[: each.prompt_length]) for each in sequences]
    conversations = spread_subset(read_conversations(path), live.num_prompts, live.seed)
    template = ChatTemplate.load(verifier)
    asked = [each.until(each.answers[-1]) if each.answers else each for each in conversations]
    return [torch.tensor(template.ids(each, ask=True)) for each in asked]


def document_prompts(documents: Sequence[TokenDocument], live: LiveConfig) -> list[Tensor]:
    """What stands before the first supervised token of held-out documents.

    Raises:
        DataError: ``live.held_out`` is more than there are.
    """
    usable = [
        (document, list(document.loss_mask).index(True))
        for document in documents
        if any(document.loss_mask) and not document.loss_mask[0]
    ]
    if not 1 <= live.held_out <= len(usable):
        raise DataError(
            f"live.held_out={live.held_out}: found {len(usable)} held-out documents with a prompt, "
            "expected at least so many: ask for fewer, or give prompts=FILE"
        )
    chosen = spread_subset(usable, live.held_out, live.seed)
    return [torch.tensor(list(document.input_ids[:start])) for document, start in chosen]


def _layers(head: TrainedHead, config: Config) -> tuple[int, ...]:
    said = config.data.aux_layer_ids
    if head.aux_layer_ids is not None:
        return head.aux_layer_ids
    if said is None:
        raise ConfigError(
            f"{head.path}: found no layers that the drafter reads, or only in a numbering that "
            "differs by server, expected data.aux_layer_ids=[..] with data.layer_id_convention"
        )
    convention = config.data.layer_id_convention or LayerIdConvention.entering
    return convert_layer_ids(said, convention, LayerIdConvention.entering)


def _is_token_file(path: Path) -> bool:
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        return False
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            first = json.loads(next(iter(lines), "null"))
    except (OSError, EOFError, ValueError):
        return False  # the reader of conversations says what is wrong with it
    return isinstance(first, dict) and "ids" in first
