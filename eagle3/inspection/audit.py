"""One call that looks at a directory: index, packing, states, verifier, findings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from eagle3.capture_progress import Progress
from eagle3.data.formats import open_store
from eagle3.data.masks import Runs
from eagle3.data.packing import PackingRule
from eagle3.data.sources import label
from eagle3.data.vocab_files import read_vocab_map
from eagle3.errors import ConfigError
from eagle3.inspection.agreement import agreement_facts, passes
from eagle3.inspection.contents import content_facts, document_name
from eagle3.inspection.directory import OpenDirectory, directory_facts, open_directory
from eagle3.inspection.facts import (
    AgreementFacts,
    Audit,
    BadFile,
    PackingFacts,
    Shown,
    VocabFacts,
)
from eagle3.inspection.findings import judge
from eagle3.inspection.packing import packing_facts, read_facts
from eagle3.inspection.shown import shown_document
from eagle3.inspection.stated import GivenFacts, find_sizes
from eagle3.inspection.states import (
    SampledDocument,
    Sampling,
    sample_documents,
    spread,
    state_facts,
)
from eagle3.names import LongDocuments, TrainOn
from eagle3.token_text import decoder

PROBED_TOKENS = 1024
"""Tokens that the verifier's head is applied to; a rate over them is known to 3 points or so."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class AuditRequest:
    """What to look at, and how closely."""

    directory: Path
    cache: Path
    """Where the index is kept, outside the directory."""
    verifier: Path | None = None
    """Directory of the verifier; None: what needs its head is left out."""
    vocab_map: Path | None = None
    """Draft vocabulary; None: its coverage is left out."""
    given: GivenFacts = field(default_factory=GivenFacts)
    arrow: Path | None = None
    """Arrow data set of speculators 0.9; None: in the directory or its parent."""
    source_labels: Path | None = None
    """CSV file of source labels; None: as the directory has it."""
    samples: int = 64
    """Documents whose states are read, spread evenly."""
    shown: int = 1
    """Of these, how many to decode."""
    max_seq_lens: tuple[int, ...] = (2048, 4096, 8192)
    """Rows of a pack, to be tried."""
    long_documents: LongDocuments = LongDocuments.split
    split_context_tokens: int = 128
    ttt_steps: int = 3
    train_on: TrainOn = TrainOn.assistant
    val_ratio: float = 0.05
    tokens_per_s: float = 10_000.0
    """Rows trained per second, all ranks together, to state the read rate for."""
    num_workers: int = 4
    """Threads that read."""
    device: str = "cpu"
    """Where the verifier's head is applied."""


def run_audit(request: AuditRequest, say: Say) -> Audit:
    """Look at ``request.directory`` and judge it; nothing is written into it.

    Args:
        request: what to look at.
        say: takes lines of progress where it takes long.

    Raises:
        DataError: the directory cannot be opened at all, or no document in it is usable.
        VerifierError: norm or head of the verifier cannot be read.
        ConfigError: an option that makes no sense.
    """
    _check(request)
    sizes = find_sizes(request.directory, request.given, request.verifier)
    opened = open_directory(
        open_store(request.directory, sizes.layout, request.arrow),
        sizes,
        request.given.declaration,
        request.cache,
        request.num_workers,
    )
    index = opened.index
    runs = index.runs.train_on(request.train_on, index.lengths)
    gates = runs.gated_rows()
    labels = label(index, request.directory, request.source_labels)
    sampled, unreadable = _read(request, opened, runs, say)
    audit = Audit(
        directory=directory_facts(opened),
        contents=content_facts(index, labels, request.train_on, request.val_ratio),
        packing=_packing(request, opened, gates),
        reading=read_facts(index, sizes.layout, gates, request.tokens_per_s),
        states=state_facts(sampled, unreadable, opened.state_names, opened.bytes_per_token),
        agreement=_agreement(request, opened, sampled, say),
        vocab=_vocab(request, runs, sampled),
        shown=_shown(request, opened, runs, sampled),
    )
    return audit.with_findings(judge(audit))


def _check(request: AuditRequest) -> None:
    for name in ("samples", "num_workers", "ttt_steps"):
        if getattr(request, name) < 1:
            raise ConfigError(
                f"--{name.replace('_', '-')}: found {getattr(request, name)}, expected at least 1."
            )
    if not 0 <= request.val_ratio < 1:
        raise ConfigError(
            f"--val-ratio: found {request.val_ratio:g}, expected a share from 0 to below 1, such "
            "as 0.05."
        )
    if not request.max_seq_lens or min(request.max_seq_lens) < 1:
        raise ConfigError(
            f"--max-seq-len: found {list(request.max_seq_lens)}, expected numbers of rows, such as "
            "2048,4096,8192."
        )
    if request.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--device: found cuda, but torch can use no CUDA device here. Give --device=cpu."
        )


def _read(
    request: AuditRequest, opened: OpenDirectory, runs: Runs, say: Say
) -> tuple[list[SampledDocument], tuple[BadFile, ...]]:
    documents = spread(len(opened.index), request.samples)
    progress = Progress(int(opened.index.lengths[documents].sum()), say, "states")
    probe_rows = -(-PROBED_TOKENS // len(documents))
    sampling = Sampling(opened.store, opened.index, runs, probe_rows)
    return sample_documents(sampling, documents.tolist(), request.num_workers, progress.add)


def _packing(request: AuditRequest, opened: OpenDirectory, gates: Runs) -> tuple[PackingFacts, ...]:
    rules = (
        PackingRule(limit, request.long_documents, request.split_context_tokens, request.ttt_steps)
        for limit in sorted(set(request.max_seq_lens))
    )
    return tuple(packing_facts(opened.index.lengths, gates, rule) for rule in rules)


def _agreement(
    request: AuditRequest, opened: OpenDirectory, sampled: Sequence[SampledDocument], say: Say
) -> AgreementFacts | None:
    probes = [document.probe for document in sampled if len(document.probe.next_ids)]
    if request.verifier is None or not probes:
        return None
    rows = sum(len(probe.next_ids) for probe in probes)
    progress = Progress(
        rows * passes(opened.sizes.layout.num_aux_layers), say, "verifier's head", "rows"
    )
    device = torch.device(request.device)
    return agreement_facts(request.verifier, probes, opened.last_hidden, device, progress.add)


def _vocab(
    request: AuditRequest, runs: Runs, sampled: Sequence[SampledDocument]
) -> VocabFacts | None:
    if request.vocab_map is None:
        return None
    vocab = read_vocab_map(request.vocab_map)
    covered = tokens = 0
    for document in sampled:
        mask = runs.mask(document.document, len(document.input_ids))
        supervised = document.input_ids[torch.from_numpy(mask)]
        known = supervised[supervised < vocab.verifier_size]
        tokens += len(supervised)
        covered += int(vocab.covers(known).sum())
    return VocabFacts(vocab.draft_size, tokens, covered / max(tokens, 1))


def _shown(
    request: AuditRequest, opened: OpenDirectory, runs: Runs, sampled: Sequence[SampledDocument]
) -> tuple[Shown, ...]:
    decode = decoder(request.verifier or request.directory)
    chosen = [sampled[k] for k in spread(len(sampled), request.shown).tolist()]
    return tuple(
        shown_document(
            document_name(opened.index, one.document),
            one.input_ids.numpy(),
            runs.mask(one.document, len(one.input_ids)),
            decode,
        )
        for one in chosen
    )
