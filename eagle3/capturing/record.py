"""``capture.json`` beside a capture: whose states they are, and how they came about.

The manifest says what training has to know; this says what people ask when figures differ.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import eagle3
from eagle3.capturing.documents import Document
from eagle3.capturing.gathering import writes_answers
from eagle3.capturing.plan import CapturePlan
from eagle3.data.native_manifest import VerifierFacts
from eagle3.data.tokenizer_fingerprint import tokenizer_fingerprint
from eagle3.errors import DataError
from eagle3.verifier.states import StatesOffer

RECORD_NAME = "capture.json"


def record_of(
    plan: CapturePlan, offer: StatesOffer, documents: Sequence[Document], failed: Sequence[str]
) -> dict[str, Any]:
    """Its content."""
    settings = plan.settings
    return {
        "created_by": f"eagle3 {eagle3.__version__}",
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "whole": plan.whole,
        "part": settings.part,
        "parts": settings.parts,
        "input": plan.source,
        "verifier": asdict(plan.verifier),
        "states": {
            **offer.record(),
            "aux_layer_ids": list(plan.aux_layer_ids),
            "computed_in": offer.dtype,
            "stored_in": str(settings.stored_dtype),
        },
        "chat_template": template_fingerprint(plan.verifier_dir),
        "answers": asdict(plan.sampling) if writes_answers(plan) else None,
        "train_on": str(settings.train_on),
        "documents": len(documents),
        "tokens": sum(len(document.ids) for document in documents),
        "supervised_tokens": sum(b - a for d in documents for a, b in d.spans),
        "failed": list(failed),
    }


def read_record(directory: Path) -> dict[str, Any]:
    """Read it.

    Raises:
        DataError: it is not there, or no JSON.
    """
    path = directory / RECORD_NAME
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}), expected the record of a complete capture. Give "
            "the directory of one"
        ) from error
    return content


def verifier_facts(plan: CapturePlan, offer: StatesOffer) -> VerifierFacts:
    """For the manifest."""
    return VerifierFacts(
        name=plan.verifier.name,
        tokenizer_fingerprint=tokenizer_fingerprint(plan.verifier_dir),
        chat_template_fingerprint=template_fingerprint(plan.verifier_dir),
        quantization=offer.quantization,
    )


def template_fingerprint(directory: Path) -> str | None:
    """SHA-256 of the chat template; None where there is none."""
    text = None
    alone, config = directory / "chat_template.jinja", directory / "tokenizer_config.json"
    if alone.is_file():
        text = alone.read_text(encoding="utf-8")
    elif config.is_file():
        found = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
        text = None if found is None else json.dumps(found, sort_keys=True)
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()
