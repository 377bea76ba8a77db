"""Capture some documents again and compare: are the stored states the verifier's?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3.capturing.config import CaptureRunConfig
from eagle3.capturing.plan import choose_device, required
from eagle3.capturing.record import read_record
from eagle3.data.native import NativeStore
from eagle3.data.native_manifest import read_manifest
from eagle3.data.reading import StateReader
from eagle3.errors import DataError
from eagle3.model.layers import rms_norm
from eagle3.model.verifier_head import VerifierHead
from eagle3.model.weights import load_head_weights
from eagle3.names import LastHidden
from eagle3.tokens import spread_subset
from eagle3.verifier.base import describe_verifier
from eagle3.verifier.huggingface import HuggingFaceVerifier

LIMITS = {"float32": 0.01, "float16": 0.03, "bfloat16": 0.1}
"""Largest distance of stored from recaptured states over their size, by the dtype that computed
them. Storing in bfloat16 alone gives 0.002, the state of a neighbouring layer is far beyond."""
MIN_AGREEMENT = 0.98
"""Least share of tokens for which the stored last state gives the model's own best next token."""


@dataclass(frozen=True)
class Compared:
    """One document."""

    document: int
    distances: tuple[float, ...]
    """Of each aux state and of the last one."""
    agreement: float


def verify(settings: CaptureRunConfig, log: Callable[[str], None]) -> list[Compared]:
    """Recapture ``settings.verify_samples`` documents of ``settings.out``.

    Raises:
        DataError: states that differ by more than rounding; names document and state.
        VerifierError: the verifier is not the one that was captured, or cannot be loaded.
    """
    directory = Path(required(settings.out, "out", "the directory of a complete capture"))
    verifier_dir = Path(required(settings.verifier, "verifier", "the verifier's directory"))
    record, manifest = read_record(directory), read_manifest(directory)
    _check_same_verifier(record, verifier_dir)
    store = NativeStore(directory, manifest.states.layout)
    reader = StateReader(store, store.stored_index(None))
    count = min(settings.verify_samples, manifest.num_samples)
    chosen = spread_subset(range(manifest.num_samples), count, settings.seed)
    dtype: torch.dtype = getattr(torch, settings.dtype)
    verifier = HuggingFaceVerifier(verifier_dir, dtype, choose_device(settings.device))
    weights = load_head_weights(verifier_dir, torch.float32)
    head = VerifierHead(
        weights.norm,
        weights.head,
        eps=weights.config.rms_norm_eps,
        last_hidden=manifest.states.last_hidden,
        full_weight=weights.head,
    )
    found = [
        _compare(document, reader, verifier, head, manifest.states.aux_layer_ids)
        for document in chosen
    ]
    limit = LIMITS[str(record["states"]["computed_in"])]
    names = [f"entering {k}" for k in manifest.states.aux_layer_ids] + ["last"]
    for number, name in enumerate(names):
        worst = max(each.distances[number] for each in found)
        log(f"{name:<12} at most {worst:.2g} away from a capture now (limit {limit})")
    least = min(each.agreement for each in found)
    log(f"best token   the model's own in {least:.1%} of each document or more ({count} documents)")
    _check(found, names, limit, directory)
    return found


def _check_same_verifier(record: dict[str, Any], verifier_dir: Path) -> None:
    ours, theirs = describe_verifier(verifier_dir), record["verifier"]
    if ours.weights_fingerprint != theirs["weights_fingerprint"]:
        raise DataError(
            f"{verifier_dir}: found other weights than those of {theirs['name']}, whose states "
            "were captured: give the verifier of the capture"
        )


def _compare(
    document: int,
    reader: StateReader,
    verifier: HuggingFaceVerifier,
    head: VerifierHead,
    layers: tuple[int, ...],
) -> Compared:
    sample = reader.sample(document)
    (now,) = verifier.capture([sample.input_ids], layers)
    last = now.last if head.last_hidden is LastHidden.pre_norm else _normed(now.last, head)
    stored = (*sample.aux_hidden.chunk(len(layers), dim=-1), sample.last_hidden)
    distances = [_distance(a, b) for a, b in zip(stored, (*now.aux, last), strict=True)]
    best = head.full_argmax(sample.last_hidden.float())
    assert best is not None
    own = verifier.logits(sample.input_ids).argmax(-1).cpu()
    return Compared(document, tuple(distances), float((best.cpu() == own).double().mean()))


def _normed(last: Tensor, head: VerifierHead) -> Tensor:
    return rms_norm(last.float().cpu(), head.norm_weight, head.eps)


def _distance(stored: Tensor, now: Tensor) -> float:
    """The median over tokens, so that no huge state of a first token decides alone."""
    stored, now = stored.double(), now.double().cpu()
    relative = (stored - now).norm(dim=-1) / now.norm(dim=-1).clamp(min=1e-30)
    return float(relative.median())


def _check(found: list[Compared], names: list[str], limit: float, directory: Path) -> None:
    wrong = [
        f"document {each.document}: {name} is {distance:.2g} away"
        for each in found
        for name, distance in zip(names, each.distances, strict=True)
        if not distance <= limit
    ]
    wrong += [
        f"document {each.document}: the last state gives the model's own best token in "
        f"{each.agreement:.1%} of the places only"
        for each in found
        if each.agreement < MIN_AGREEMENT
    ]
    if wrong:
        raise DataError(
            "\n       ".join(
                [
                    f"{directory}: found other states than the verifier gives now, expected the "
                    "same up to rounding: its layers, norm or weights are not what is recorded",
                    *wrong[:20],
                ]
            )
        )
