"""What a capture was asked for, after all checks that need neither weights nor template."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from eagle3.capturing.config import CaptureRunConfig
from eagle3.capturing.documents import Document, input_hash, of_sequence, part_of
from eagle3.conversations.messages import Conversation
from eagle3.conversations.reading import read_conversations
from eagle3.data.layout import StateLayout
from eagle3.errors import ConfigError, VerifierError
from eagle3.names import CaptureFormat, StatesDtype
from eagle3.tokens import read_token_file, spread_subset
from eagle3.verifier.base import Sampling, VerifierDescription, describe_verifier

_CPU_BATCH, _GPU_BATCH = 1024, 8192
"""Tokens of a prefill. On CPU about 1,000 measured fastest: the activations of a layer then stay in
the cache."""


@dataclass(frozen=True)
class CapturePlan:
    """One capture."""

    settings: CaptureRunConfig
    verifier_dir: Path
    verifier: VerifierDescription
    out: Path
    aux_layer_ids: tuple[int, ...]
    device: torch.device
    batch_tokens: int
    source: str
    """Name of the file with the prompts or tokens."""
    items: tuple[Conversation, ...] | tuple[Document, ...]
    """Of this part."""
    sampling: Sampling
    whole: str
    """Name of the input and all settings that change a result, whatever the part."""

    @property
    def job(self) -> str:
        """Name of this part of it."""
        return f"{self.whole}-{self.settings.part}-of-{self.settings.parts}"

    @property
    def layout(self) -> StateLayout:
        """Sizes of the states."""
        verifier = self.verifier
        return StateLayout(len(self.aux_layer_ids), verifier.hidden_size, verifier.vocab_size)

    @property
    def shard_bytes(self) -> int:
        """Of one native shard."""
        return int(self.settings.shard_gb * 1e9)


def plan_capture(settings: CaptureRunConfig) -> CapturePlan:
    """Check the settings and read the input.

    Raises:
        ConfigError: a setting is missing or wrong.
        DataError: the file with the prompts or tokens is missing or broken.
        VerifierError: the verifier's directory cannot be read.
    """
    verifier_dir = Path(required(settings.verifier, "verifier", "the verifier's directory"))
    out = Path(required(settings.out, "out", "a new directory for the states"))
    _check_numbers(settings)
    verifier = describe_verifier(verifier_dir)
    layers = layer_ids(settings.aux_layer_ids, verifier)
    device = choose_device(settings.device)
    batch_tokens = settings.batch_tokens or (_CPU_BATCH if device.type == "cpu" else _GPU_BATCH)
    path, chosen = _chosen(settings)
    sampling = resolve_sampling(settings, verifier_dir)
    facts = {
        "input": input_hash(chosen),
        "verifier": [verifier.weights_fingerprint, verifier.tokenizer_fingerprint],
        "aux_layer_ids": layers,
        "dtype": [settings.dtype, settings.stored_dtype],
        "batch_tokens": batch_tokens,
        "server": settings.server.form,
        "answers": [settings.answers.regenerate, asdict(sampling), settings.answers.batch_tokens],
        "kept": [settings.train_on, settings.max_length, settings.format, settings.shard_gb],
    }
    name = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=12).hexdigest()
    return CapturePlan(
        settings=settings,
        verifier_dir=verifier_dir,
        verifier=verifier,
        out=out,
        aux_layer_ids=layers,
        device=device,
        batch_tokens=batch_tokens,
        source=path.name,
        items=part_of(chosen, settings.part, settings.parts),
        sampling=sampling,
        whole=name,
    )


def required(value: str | None, key: str, what: str) -> str:
    """``value``, which has to be set."""
    if value is None:
        raise ConfigError(f"{key} is not set: give {key}=DIR, {what}")
    return value


def layer_ids(wanted: Sequence[int], verifier: VerifierDescription) -> tuple[int, ...]:
    """Ids of the aux states, by default early, middle and late.

    The default are the layers that both engines take where a drafter says nothing: entering 2,
    n // 2 and n - 3.
    """
    n = verifier.num_layers
    found = tuple(wanted) or (2, n // 2, n - 3)
    ascending = all(a < b for a, b in pairwise(found))
    if not (ascending and all(0 <= k <= n for k in found)):
        raise ConfigError(
            f"aux_layer_ids is {list(found)}, expected ascending ids from 0 to {n}, the layers of "
            f"{verifier.name} (id k is the state entering layer k)"
        )
    return found


def choose_device(name: str) -> torch.device:
    """``auto`` is a GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device is {name!r}, expected auto, cpu, cuda or cuda:N") from error


def resolve_sampling(settings: CaptureRunConfig, verifier_dir: Path) -> Sampling:
    """What is not set is what the verifier's ``generation_config.json`` says, else greedy."""
    answers, path = settings.answers, verifier_dir / "generation_config.json"
    try:
        said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise VerifierError(f"{path}: cannot be read ({error}). Expected JSON.") from error
    own = float(said.get("temperature") or 1.0) if said.get("do_sample") else 0.0
    temperature = own if answers.temperature is None else answers.temperature
    top_p = said.get("top_p") if answers.top_p is None else answers.top_p
    top_k = said.get("top_k") if answers.top_k is None else answers.top_k
    return Sampling(
        max_new_tokens=answers.max_new_tokens,
        temperature=temperature,
        top_p=1.0 if top_p is None or temperature == 0 else float(top_p),
        top_k=0 if top_k is None or temperature == 0 else int(top_k),
        seed=answers.seed,
    )


def _check_numbers(settings: CaptureRunConfig) -> None:
    least = {
        "parts": settings.parts,
        "verify_samples": settings.verify_samples,
        "writers": settings.writers,
        "batch_tokens": settings.batch_tokens or 1,
        "answers.max_new_tokens": settings.answers.max_new_tokens,
        "answers.batch_tokens": settings.answers.batch_tokens,
    }
    for key, value in least.items():
        if value < 1:
            raise ConfigError(f"{key} is {value}, expected at least 1")
    if not 0 <= settings.part < settings.parts:
        raise ConfigError(
            f"part is {settings.part}, expected 0 to {settings.parts - 1} (parts={settings.parts})"
        )
    if settings.format is CaptureFormat.v1:
        stored, server = settings.stored_dtype, settings.server.url
        if stored is not StatesDtype.bfloat16 or server is not None:
            raise ConfigError(
                f"format=v1: found stored_dtype={stored} and server.url={server}, expected "
                "bfloat16 and a model in this process, which is all that format can say: take "
                "format=native"
            )
    if settings.shard_gb <= 0:
        raise ConfigError(f"shard_gb is {settings.shard_gb}, expected more than 0")
    if settings.server.url is not None and settings.server.form is None:
        raise ConfigError("server.url is set without server.form: say which one the server offers")


def _chosen(
    settings: CaptureRunConfig,
) -> tuple[Path, tuple[Conversation, ...] | tuple[Document, ...]]:
    if (settings.prompts is None) == (settings.tokens is None):
        raise ConfigError(
            f"found prompts={settings.prompts} and tokens={settings.tokens}, expected one of them: "
            "a file of prompts or conversations, or one of token ids"
        )
    count, seed = settings.num_samples, settings.seed
    if settings.prompts is not None:
        path = Path(settings.prompts)
        return path, spread_subset(read_conversations(path), count, seed)
    path = Path(str(settings.tokens))
    sequences = read_token_file(path)
    documents = [of_sequence(s, f"{path}, line {n}") for n, s in enumerate(sequences, 1)]
    return path, spread_subset(documents, count, seed)
