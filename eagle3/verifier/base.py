"""What a verifier says of itself, and the states it hands out; needs no transformers."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from eagle3.errors import VerifierError
from eagle3.verifier.states import StatesOffer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "chat_template.jinja")
SAMPLED_BYTES = 1 << 20


@dataclass(frozen=True)
class VerifierDescription:
    """Identity of a verifier directory. Moving or copying the directory changes nothing here
    but ``name``."""

    name: str
    """Directory name, for people."""
    hidden_size: int
    num_layers: int
    vocab_size: int
    rms_norm_eps: float
    tokenizer_fingerprint: str
    """SHA-256 of the tokenizer's files and the chat template; empty when there are none."""
    weights_fingerprint: str
    """SHA-256 of each weight file's name, size and 1 MiB from its middle."""


@dataclass(frozen=True)
class CapturedStates:
    """States of one document of n tokens, in the verifier's dtype, on its device."""

    aux: tuple[Tensor, ...]
    """One [n, H] tensor per requested layer id, in the order of the request."""
    last: Tensor
    """[n, H], before or after the final norm, as :attr:`Verifier.offer` says."""


@dataclass(frozen=True)
class Sampling:
    """How answers are generated."""

    max_new_tokens: int
    """The end-of-sequence token counts."""
    temperature: float = 0.0
    """0: the best token always."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    seed: int = 0


class Verifier(Protocol):
    """A capture back end."""

    @property
    def offer(self) -> StatesOffer:
        """What it gives, for the record of a capture."""
        ...

    def describe(self) -> VerifierDescription:
        """Identity and sizes."""
        ...

    def capture(
        self, token_ids: Sequence[Tensor], aux_layer_ids: Sequence[int]
    ) -> list[CapturedStates]:
        """Prefill a batch of documents; layer id k is the residual stream entering layer k."""
        ...


class Generator(Protocol):
    """A back end that also writes answers."""

    def generate(self, prompts: Sequence[Tensor], sampling: Sampling) -> list[Tensor]:
        """Answers to a batch of prompts.

        Args:
            prompts: int64 [n] each, n >= 1.
            sampling: The same prompts with the same sampling give the same answers.

        Returns:
            int64 [m] each: the new tokens, with the one that ends the answer where it came in time.
        """
        ...


def require_extra(*modules: str) -> None:
    """Raise :class:`VerifierError` that names the remedy when an optional module is missing."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise VerifierError(
            f"Running a verifier needs {' and '.join(missing)}, not installed here. "
            "Install with: pip install 'eagle3[verifier]'"
        )


def describe_verifier(directory: Path) -> VerifierDescription:
    """Read a verifier's identity from its files, without loading the model.

    Raises:
        VerifierError: no readable ``config.json``, a size missing in it, or no weight files.
    """
    config = _read_config(directory / "config.json")
    return VerifierDescription(
        name=directory.resolve().name,
        hidden_size=int(_field(config, "hidden_size", directory)),
        num_layers=int(_field(config, "num_hidden_layers", directory)),
        vocab_size=int(_field(config, "vocab_size", directory)),
        rms_norm_eps=float(_field(config, "rms_norm_eps", directory)),
        tokenizer_fingerprint=_tokenizer_fingerprint(directory),
        weights_fingerprint=_weights_fingerprint(directory),
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise VerifierError(
            f"{path}: cannot be read ({error}). Expected a Hugging Face model directory; "
            "set paths.verifier to one."
        ) from error
    # Multimodal models keep the sizes of their language model one level down.
    nested: dict[str, Any] = config.get("text_config", config)
    return nested


def _field(config: dict[str, Any], key: str, directory: Path) -> Any:
    if key not in config:
        raise VerifierError(
            f"{directory / 'config.json'}: no key {key!r}, found {sorted(config)}. "
            "Expected the config of a decoder-only language model."
        )
    return config[key]


def _tokenizer_fingerprint(directory: Path) -> str:
    digest = hashlib.sha256()
    parts = [(n, (directory / n).read_bytes()) for n in TOKENIZER_FILES if (directory / n).exists()]
    legacy = directory / "tokenizer_config.json"
    if legacy.exists() and (template := json.loads(legacy.read_text()).get("chat_template")):
        parts.append(("chat_template.jinja", json.dumps(template).encode()))
    for name, content in parts:
        digest.update(f"{name}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest() if parts else ""


def _weights_fingerprint(directory: Path) -> str:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise VerifierError(
            f"{directory}: holds no *.safetensors, found "
            f"{sorted(p.name for p in directory.iterdir())}. Set paths.verifier to a directory "
            "with the verifier's weights."
        )
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as handle:
            handle.seek(max(0, (size - SAMPLED_BYTES) // 2))
            digest.update(handle.read(SAMPLED_BYTES))
    return digest.hexdigest()
