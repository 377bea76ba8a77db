"""Token ids to hidden-state shards: prefill the verifier over whole documents and store its states.

The result is a speculators v1 directory: ``data_{i}.pt`` for document i, each with ``input_ids``
(int64 [n]), ``loss_mask`` (int64 [n], 1 on response tokens) and ``hidden_states``, a list of K + 1
bfloat16 tensors [n, H]: the K aux states, low layer first, then the state before the final norm.

A file appears by one rename, so it is whole or absent; a capture that was killed goes on where it
stopped when it is called again. ``data_config.json`` comes last (:mod:`eagle3.capture_config`).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from eagle3.capture_config import (
    CONFIG_NAME,
    STARTED_NAME,
    CaptureRequest,
    check_same_capture,
    config_content,
    read_existing,
    write_config,
)
from eagle3.capture_progress import Progress, print_line, size
from eagle3.capturing.batches import plan_batches
from eagle3.document_files import is_whole, remove_leftovers, save_document, stored_bytes
from eagle3.errors import ConfigError, DataError
from eagle3.locking import exclusive
from eagle3.tokens import SupervisedIds
from eagle3.verifier.base import VerifierDescription, describe_verifier
from eagle3.verifier.huggingface import HuggingFaceVerifier

BATCH_TOKENS = 1024
"""Tokens of a prefill batch, padding included. On CPU about 1,000 measured fastest: the activations
of a layer then stay in the cache. On a GPU take 8,192 or more."""
_DISK_MARGIN = 1.02


@dataclass(frozen=True)
class CaptureSummary:
    """What a capture found and did."""

    num_samples: int
    """Documents in the directory."""
    num_tokens: int
    num_kept: int
    """Documents that were there already."""
    num_captured_tokens: int
    seconds: float
    """Spent on the captured tokens, loading of the model included."""


@dataclass(frozen=True)
class _Job:
    """One capture after all checks."""

    request: CaptureRequest
    sequences: Sequence[SupervisedIds]
    directory: Path
    batch_tokens: int
    device: torch.device | str
    log: Callable[[str], None]

    def path(self, index: int) -> Path:
        return self.directory / f"data_{index}.pt"


def capture_sequences(
    verifier_dir: Path,
    sequences: Sequence[SupervisedIds],
    out_dir: Path,
    *,
    aux_layer_ids: Sequence[int],
    batch_tokens: int = BATCH_TOKENS,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    source: str = "token sequences",
    log: Callable[[str], None] = print_line,
) -> CaptureSummary:
    """Capture these documents; document i becomes ``data_{i}.pt``.

    Args:
        verifier_dir: Hugging Face directory of the verifier.
        sequences: Token ids and what of them is supervised.
        out_dir: Made if missing; continued if it holds a part of this capture.
        aux_layer_ids: Ascending; id k is the residual stream entering layer k.
        batch_tokens: Tokens of one prefill, padding included; a longer document goes alone.
        dtype: Of the computation.
        device: Where the verifier runs.
        source: Where the ids came from, for ``data_config.json``.
        log: Takes one line of progress at a time.

    Raises:
        DataError: an ``out_dir`` with another capture, or too little disk.
        VerifierError: a bad verifier directory, missing packages, or non-finite states.
        ConfigError: layer ids that are not the verifier's or not ascending.
    """
    verifier = describe_verifier(verifier_dir)
    _check_layers(aux_layer_ids, verifier)
    _check_tokens(sequences, verifier)
    request = CaptureRequest(
        verifier_dir=verifier_dir,
        verifier=verifier,
        aux_layer_ids=tuple(aux_layer_ids),
        dtype=dtype,
        num_samples=len(sequences),
        num_tokens=sum(len(s.ids) for s in sequences),
        token_hash=_hash(sequences),
        source=source,
    )
    job = _Job(request, sequences, out_dir, batch_tokens, device, log)
    if _is_complete(job):
        return CaptureSummary(request.num_samples, request.num_tokens, request.num_samples, 0, 0.0)
    with exclusive(out_dir / ".lock", log):
        return _complete(job)


def _hash(sequences: Sequence[SupervisedIds]) -> str:
    digest = hashlib.sha256()
    for sequence in sequences:
        digest.update(json.dumps([sequence.ids, sequence.loss_mask]).encode() + b"\n")
    return digest.hexdigest()


def _check_layers(aux_layer_ids: Sequence[int], verifier: VerifierDescription) -> None:
    ascending = all(a < b for a, b in pairwise(aux_layer_ids))
    existing = all(0 <= k <= verifier.num_layers for k in aux_layer_ids)
    if not (aux_layer_ids and ascending and existing):
        raise ConfigError(
            f"capture.aux_layer_ids is {list(aux_layer_ids)}, expected ascending ids from 0 to "
            f"{verifier.num_layers}, the layers of {verifier.name} (id k is the state entering "
            "layer k). Set for example capture.aux_layer_ids=[2,"
            f"{verifier.num_layers // 2},{verifier.num_layers - 3}]"
        )


def _check_tokens(sequences: Sequence[SupervisedIds], verifier: VerifierDescription) -> None:
    for index, sequence in enumerate(sequences):
        largest = max(sequence.ids, default=verifier.vocab_size)
        if largest >= verifier.vocab_size:
            found = f"id {largest}" if sequence.ids else "no ids"
            raise DataError(
                f"document {index} of the token sequences: {found}, expected ids below "
                f"{verifier.vocab_size}, the vocabulary of {verifier.name}. Use the verifier that "
                "wrote the tokens."
            )


def _is_complete(job: _Job) -> bool:
    """Whether nothing is left to do; such a directory may be read-only.

    Raises:
        DataError: the directory holds another capture.
    """
    existing = read_existing(job.directory)
    if existing is not None:
        check_same_capture(job.directory, existing, config_content(job.request))
    present = all(job.path(index).exists() for index in range(len(job.sequences)))
    return present and (job.directory / CONFIG_NAME).exists()


def _complete(job: _Job) -> CaptureSummary:
    """Capture what is missing, then write ``data_config.json``."""
    started = time.monotonic()
    if _is_complete(job):  # by the process we waited for
        missing = []
    else:
        missing = [
            index
            for index, sequence in enumerate(job.sequences)
            if not is_whole(job.path(index), sequence, job.request)
        ]
        _forecast(job, missing)
        content = config_content(job.request)
        write_config(job.directory / STARTED_NAME, content)
        (job.directory / CONFIG_NAME).unlink(missing_ok=True)
        remove_leftovers(job.directory)
        _capture(job, missing)
        write_config(job.directory / CONFIG_NAME, content)
        (job.directory / STARTED_NAME).unlink()
    return CaptureSummary(
        num_samples=job.request.num_samples,
        num_tokens=job.request.num_tokens,
        num_kept=job.request.num_samples - len(missing),
        num_captured_tokens=sum(len(job.sequences[index].ids) for index in missing),
        seconds=time.monotonic() - started,
    )


def _forecast(job: _Job, missing: Sequence[int]) -> None:
    tokens = sum(len(job.sequences[index].ids) for index in missing)
    needed = stored_bytes(tokens, len(missing), job.request)
    free = shutil.disk_usage(job.directory).free
    job.log(
        f"capture into {job.directory}: {len(missing)} documents, {tokens:,} tokens, "
        f"{size(needed)} (free: {size(free)}); "
        f"{len(job.sequences) - len(missing)} documents are there already"
    )
    if needed * _DISK_MARGIN > free:
        raise DataError(
            f"{job.directory}: the capture needs {size(needed)}, found {size(free)} free. Free "
            "some space, set paths.shards to another disk, or lower capture.num_samples."
        )


def _capture(job: _Job, missing: Sequence[int]) -> None:
    """Batches are planned over all documents, so that a capture which goes on after a stop gives
    the same files to the last bit: rounding depends on the batch a document is in."""
    if not missing:
        return
    verifier = HuggingFaceVerifier(job.request.verifier_dir, job.request.dtype, job.device)
    lengths = [len(sequence.ids) for sequence in job.sequences]
    wanted = set(missing)
    progress = Progress(sum(lengths[index] for index in wanted), job.log)
    for batch in plan_batches(lengths, job.batch_tokens):
        if wanted.isdisjoint(batch):
            continue
        ids = [torch.tensor(job.sequences[index].ids) for index in batch]
        states_of = dict(zip(batch, verifier.capture(ids, job.request.aux_layer_ids), strict=True))
        for index in wanted.intersection(batch):
            save_document(job.path(index), job.sequences[index], states_of[index])
        progress.add(sum(lengths[index] for index in wanted.intersection(batch)))
