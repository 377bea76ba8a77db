"""One capture from the plan to a complete directory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import eagle3
from eagle3.capturing.documents import Document, native_documents
from eagle3.capturing.engines import Engine
from eagle3.capturing.gathering import expected_tokens, gather
from eagle3.capturing.native import Filler, FillSettings
from eagle3.capturing.plan import CapturePlan
from eagle3.capturing.record import RECORD_NAME, read_record, record_of, verifier_facts
from eagle3.capturing.streams import Captured, states_of
from eagle3.data.bad_samples import BadSamples
from eagle3.data.disk import free_bytes, size
from eagle3.data.native import WRITING_NAME, is_native
from eagle3.data.native_manifest import Manifest, StateFacts, read_manifest
from eagle3.data.native_shard import token_bytes
from eagle3.data.native_writer import NativeWriter
from eagle3.errors import DataError
from eagle3.locking import exclusive
from eagle3.names import CaptureFormat, LastHidden
from eagle3.prefill import capture_sequences
from eagle3.verifier.base import Verifier

ANSWERS_NAME = "answers.jsonl"
_MAX_FAILED = "max_failed"


@dataclass(frozen=True)
class CaptureOutcome:
    """What a capture has come to."""

    directory: Path
    documents: int
    tokens: int
    failed: tuple[str, ...]
    """A line for each document that was left out."""


def forecast(plan: CapturePlan) -> str:
    """What a capture will take, before a model is loaded."""
    documents, tokens = expected_tokens(plan)
    needed = tokens * token_bytes(plan.layout, str(plan.settings.stored_dtype))
    part = f", part {plan.settings.part} of {plan.settings.parts}" * (plan.settings.parts > 1)
    return (
        f"capture of {plan.source}{part} into {plan.out}: {documents:,} documents, at most "
        f"{tokens:,} tokens, {size(needed)}; {size(free_bytes(plan.out))} of disk free"
    )


def capture(plan: CapturePlan, log: Callable[[str], None]) -> CaptureOutcome:
    """Make the directory complete, going on with what an earlier process left.

    Raises:
        ConfigError, DataError, VerifierError, ServerError: as its parts do; nothing is lost.
    """
    log(forecast(plan))
    failed = BadSamples(plan.settings.max_failed, _MAX_FAILED)
    engine = Engine(plan)
    if plan.settings.format is CaptureFormat.v1:
        return _capture_v1(plan, engine, failed, log)
    if is_native(plan.out):
        return _complete_already(plan, log)
    writing = plan.out / WRITING_NAME
    _claim(plan.out)
    with exclusive(plan.out.with_name(f".{plan.out.name}.lock"), log):
        if is_native(plan.out):  # by the process that was waited for
            return _complete_already(plan, log)
        writing.mkdir(parents=True, exist_ok=True)
        documents = gather(plan, engine, writing / ANSWERS_NAME, failed, log)
        manifest = _fill(plan, engine.verifier(), documents, failed, log)
    return CaptureOutcome(plan.out, manifest.num_samples, manifest.num_tokens, tuple(failed.lines))


def _fill(
    plan: CapturePlan,
    verifier: Verifier,
    documents: Sequence[Document],
    failed: BadSamples,
    log: Callable[[str], None],
) -> Manifest:
    settings, offer = plan.settings, verifier.offer
    facts = StateFacts(
        layout=plan.layout,
        dtype=str(settings.stored_dtype),
        aux_layer_ids=plan.aux_layer_ids,
        last_hidden=offer.last_hidden or LastHidden.pre_norm,
    )

    def stream(among: Sequence[Document], places: Sequence[int]) -> Iterator[Captured]:
        return states_of(
            verifier,
            among,
            places,
            aux_layer_ids=plan.aux_layer_ids,
            batch_tokens=plan.batch_tokens,
            log=log,
        )

    with NativeWriter(
        plan.out, facts, native_documents(documents), _job(plan, verifier), plan.shard_bytes
    ) as writer:
        if writer.num_written:
            log(f"{writer.num_written:,} documents are there already")
        filling = FillSettings(plan.batch_tokens, settings.writers, log)
        Filler(writer, documents, stream, failed, filling).run()
        kept = [d for n, d in enumerate(documents) if n not in writer.skipped]
        record = record_of(plan, offer, kept, failed.lines)
        writer.publish(RECORD_NAME, (json.dumps(record, indent=2) + "\n").encode())
        return writer.complete(verifier_facts(plan, offer), f"eagle3 {eagle3.__version__} capture")


def _job(plan: CapturePlan, verifier: Verifier) -> str:
    """Name of the job: states of another engine, release or model never mix with these."""
    offer = json.dumps(verifier.offer.record(), sort_keys=True)
    engine = hashlib.blake2b(offer.encode(), digest_size=6).hexdigest()
    return f"{plan.job}-{verifier.offer.engine}-{verifier.offer.version}-{engine}"


def _claim(out: Path) -> None:
    """Refuse a directory of somebody else before anything is computed."""
    if out.is_dir() and not (out / WRITING_NAME).is_dir():
        others = sorted(path.name for path in out.iterdir())[:3]
        if others:
            raise DataError(
                f"{out}: found {', '.join(others)}, expected an empty directory, a new one, or one "
                "in which the same capture was interrupted. Choose another out="
            )


def _complete_already(plan: CapturePlan, log: Callable[[str], None]) -> CaptureOutcome:
    record, manifest = read_record(plan.out), read_manifest(plan.out)
    found, wanted = (record.get("whole"), record.get("part")), (plan.whole, plan.settings.part)
    if found != wanted:
        raise DataError(
            f"{plan.out}: found another capture ({record.get('input')}, part {found[1]}), expected "
            f"nothing, or this one ({plan.source}, part {wanted[1]}) with the same settings. "
            "Choose another out="
        )
    log(f"{plan.out} is complete already")
    return CaptureOutcome(
        plan.out, manifest.num_samples, manifest.num_tokens, tuple(record.get("failed", ()))
    )


def _capture_v1(
    plan: CapturePlan, engine: Engine, failed: BadSamples, log: Callable[[str], None]
) -> CaptureOutcome:
    """One file a document, on which training can begin while others are captured."""
    plan.out.mkdir(parents=True, exist_ok=True)
    documents = gather(plan, engine, plan.out / f".{ANSWERS_NAME}", failed, log)
    summary = capture_sequences(
        plan.verifier_dir,
        documents,
        plan.out,
        aux_layer_ids=plan.aux_layer_ids,
        batch_tokens=plan.batch_tokens,
        dtype=getattr(torch, plan.settings.dtype),
        device=plan.device,
        source=plan.source,
        log=log,
    )
    return CaptureOutcome(plan.out, summary.num_samples, summary.num_tokens, tuple(failed.lines))
