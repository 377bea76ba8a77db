"""What a native directory records about the verifier whose states it holds."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from eagle3.data.native_manifest import VerifierFacts
from eagle3.data.tokenizer_fingerprint import tokenizer_fingerprint
from eagle3.errors import VerifierError


def read_verifier_facts(directory: Path) -> VerifierFacts:
    """Name and fingerprints of a Hugging Face model directory; no weights are read.

    Raises:
        VerifierError: a file of it cannot be read.
        DataError: its tokenizer is damaged.
    """
    config = _read_json(directory / "config.json")
    quantization = config.get("quantization_config", {}).get("quant_method")
    return VerifierFacts(
        name=str(config.get("_name_or_path") or directory.resolve().name),
        tokenizer_fingerprint=tokenizer_fingerprint(directory),
        chat_template_fingerprint=_template_fingerprint(directory),
        quantization=None if quantization is None else str(quantization),
    )


def _template_fingerprint(directory: Path) -> str | None:
    """Hash of the chat template, from either of the places where it may stand."""
    own, shared = directory / "chat_template.jinja", directory / "tokenizer_config.json"
    try:
        template: Any = own.read_text(encoding="utf-8") if own.is_file() else None
    except (OSError, ValueError) as error:
        raise _unreadable(own, error) from error
    if template is None and shared.is_file():
        template = _read_json(shared).get("chat_template")
    if not template:
        return None
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(content, dict):
        raise VerifierError(f"{path}: found {type(content).__name__}, expected a JSON object.")
    # Multimodal models keep the settings of their language model one level down.
    nested: dict[str, Any] = content.get("text_config", {})
    return {**nested, **content}


def _unreadable(path: Path, error: Exception) -> VerifierError:
    return VerifierError(
        f"{path}: cannot be read ({error}), expected a file of a Hugging Face model directory. "
        "Give the verifier's directory."
    )
