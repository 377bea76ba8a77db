"""Verifier, documents and vocabulary map, opened one after another; each may be missing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from eagle3.checks import check, check_paths, device_count
from eagle3.config import CaptureConfig, Config
from eagle3.data.datamodule import DataModule, ShardDataModule
from eagle3.data.formats import has_documents
from eagle3.data.vocab import VocabMap
from eagle3.data.vocab_files import check_tokenizer, load_vocab_map
from eagle3.demo import SourcePaths, source_paths
from eagle3.distributed import Ranks
from eagle3.inputs import build_data
from eagle3.inspection.audit import AuditRequest, run_audit
from eagle3.inspection.findings import COVERAGE
from eagle3.inspection.stated import GivenFacts
from eagle3.model.build import check_layers, check_sizes
from eagle3.model.weights import VerifierConfig, read_verifier_config
from eagle3.names import Arrival, CaptureSource
from eagle3.preflighting.forecast import Epoch
from eagle3.preflighting.report import Report

_UNSET = "."
_SAMPLES = 16
_OWN_TOPICS = ("declaration", "packing", "draft vocabulary", "verifier")
"""Of an audit; judged here by what the run itself has read."""
_MEASURED_S, _MEASURED_WINDOWS = 5.0, 32


@dataclass(frozen=True)
class Sources:
    """What could be opened; None: not set, or a stop in the report says why not."""

    verifier: VerifierConfig | None = None
    data: ShardDataModule | None = None
    vocab: VocabMap | None = None


def settle(config: Config) -> Config:
    """The configuration without its capture: what that has made so far are paths like others."""
    if config.capture.source is CaptureSource.off:
        return config
    paths = source_paths(config)
    verifier = str(paths.verifier) if (paths.verifier / "config.json").is_file() else None
    shards = str(paths.shards[0]) if has_documents(paths.shards[0]) else None
    found = replace(config.paths, verifier=verifier, shards=shards)
    return replace(config, capture=CaptureConfig(), paths=found)


def judge_config(report: Report, config: Config) -> bool:
    """Whether the keys go together and what is set exists; paths may be left out."""
    set_paths = {
        name: getattr(config.paths, name) or _UNSET for name in ("verifier", "shards", "vocab_map")
    }
    if config.data.mixture:
        set_paths["shards"] = config.paths.shards
    report.attempt("configuration", lambda: check(replace(config, paths=replace(
        config.paths, **set_paths))))  # fmt: skip
    report.attempt("paths", lambda: check_paths(config))
    if not report.stops:
        report.ok("configuration", "all keys go together")
    return not report.stops


def open_sources(report: Report, config: Config, *, makes_map: bool) -> Sources:
    """Open what is set.

    Args:
        makes_map: build a vocabulary map from the responses where none is given.
    """
    verifier = _open_verifier(report, config)
    data = _open_data(report, config, verifier)
    return Sources(verifier, data, _open_map(report, config, data, makes_map=makes_map))


def _open_verifier(report: Report, config: Config) -> VerifierConfig | None:
    path = config.paths.verifier
    if path is None:
        report.skip("verifier", "paths.verifier is not set")
        return None

    def read() -> VerifierConfig:
        found = read_verifier_config(Path(path))
        check_sizes(config.model, found)
        return found

    found = report.attempt("verifier", read)
    if found is not None:
        report.ok(
            "verifier",
            f"hidden size {found.hidden_size:,}, {found.vocab_size:,} tokens, {found.num_layers} "
            "layers, as the drafter expects",
        )
    return found


def _open_data(
    report: Report, config: Config, verifier: VerifierConfig | None
) -> ShardDataModule | None:
    if config.data.arrival is Arrival.growing:
        report.skip("shards", "documents arrive while training (data.arrival=growing)")
        return None
    if config.paths.shards is None and not config.data.mixture:
        report.skip("shards", "paths.shards is not set")
        return None

    def opened() -> ShardDataModule:
        data = _data_module(config)
        data.setup()
        if verifier is not None:
            check_layers(data.description.aux_layer_ids, verifier)
        return data

    data = report.attempt("shards", opened)
    if data is not None:
        found = data.description
        said_by = ", ".join(dict.fromkeys(found.declared_by.values()))
        report.ok(
            "shards",
            f"{found.num_documents:,} documents, {found.num_aux_layers} aux layers entering "
            f"{list(found.aux_layer_ids)}, last state {found.last_hidden} (said by {said_by})",
        )
    return data


def _data_module(config: Config) -> ShardDataModule:
    ranks = device_count(config.trainer.devices)
    built = build_data(config, _places(config), Ranks(world_size=ranks), pin_memory=False)
    assert isinstance(built, ShardDataModule)
    return built


def _places(config: Config) -> SourcePaths:
    verifier = config.paths.verifier or _UNSET
    return source_paths(replace(config, paths=replace(config.paths, verifier=verifier)))


def _open_map(
    report: Report, config: Config, data: DataModule | None, *, makes_map: bool
) -> VocabMap | None:
    path, model = config.paths.vocab_map, config.model
    if path is not None:

        def read() -> VocabMap:
            vocab = load_vocab_map(path, model.draft_vocab_size, model.vocab_size)
            if config.paths.verifier is not None:
                report.ok("vocabulary map", check_tokenizer(path, config.paths.verifier))
            return vocab

        vocab = report.attempt("vocabulary map", read)
    elif model.draft_vocab_size == model.vocab_size:
        vocab = VocabMap.identity(model.vocab_size)
    elif makes_map and data is not None:
        counts = data.token_frequencies()
        vocab = VocabMap.from_frequencies(counts, model.draft_vocab_size, model.vocab_size)
    else:
        report.skip("vocabulary map", "paths.vocab_map is not set")
        return None
    if vocab is not None and data is not None:
        counts = data.token_frequencies()
        covered = float(counts[vocab.t2d].sum() / counts.sum().clamp(min=1))
        judge_coverage(report, vocab, covered)
    return vocab


def judge_coverage(report: Report, vocab: VocabMap, covered: float) -> None:
    """Share of the supervised training tokens that the draft vocabulary holds."""
    report.facts["vocab_coverage"] = covered
    reason = f"{vocab.draft_size:,} tokens cover {covered:.2%} of the supervised ones"
    if covered < COVERAGE:
        report.warn(
            "coverage",
            reason,
            "build a map on these responses (python -m eagle3.shards vocab), set paths.vocab_map",
        )
    else:
        report.ok("coverage", reason)


def epoch_of(data: ShardDataModule, config: Config) -> Epoch:
    """What the forecasts need of the documents."""
    packs = data.epoch_plan(0).packs
    epochs = data.epochs(config.epochs)
    return Epoch(
        packing=data.report,
        total_steps=data.total_steps(epochs, config.trainer.max_steps),
        worst_share=float((packs.supervised / packs.rows.clip(min=1)).max()),
        longest_document=int(packs.table.stop.max()) + 1,
        value_bytes=data.bytes_per_token
        // ((config.model.num_aux_layers + 1) * config.model.hidden_size),
    )


def audit_states(report: Report, config: Config) -> None:
    """Read the states of some documents: NaN, zeros, layers that are alike, the declared norm."""
    verifier = config.paths.verifier
    directories = _places(config).shards
    for directory in directories:
        request = AuditRequest(
            directory=directory,
            cache=Path(config.paths.cache),
            verifier=None if verifier is None else Path(verifier),
            given=_given(config),
            arrow=None if config.paths.arrow is None else Path(config.paths.arrow),
            samples=_SAMPLES,
            max_seq_lens=(config.max_seq_len,),
            long_documents=config.data.long_documents,
            split_context_tokens=config.data.split_context_tokens,
            ttt_steps=config.ttt_steps,
            train_on=config.data.train_on,
            val_ratio=config.data.val_ratio,
            num_workers=config.data.num_workers,
            device="cuda" if torch.cuda.is_available() else "cpu",
        )
        audit = report.attempt("states", partial(run_audit, request, _quietly))
        if audit is None:
            continue
        kept = [f for f in audit.findings if not f.topic.startswith(_OWN_TOPICS)]
        several = f"{directory}: " if len(directories) > 1 else ""
        report.findings += [replace(f, reason=f"{several}{f.reason}") for f in kept]
        if audit.agreement is None:
            report.skip("norm", "needs paths.verifier and supervised documents")


def _given(config: Config) -> GivenFacts:
    ids, model = config.data.aux_layer_ids, config.model
    return GivenFacts(
        aux_layer_ids=None if ids is None else tuple(ids),
        layer_id_convention=config.data.layer_id_convention,
        last_hidden=config.data.last_hidden,
        num_aux_layers=model.num_aux_layers,
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
    )


def measured_read_rate(config: Config) -> float | None:
    """Bytes a second that the loader gets with the reader threads of all ranks of this machine.

    Part of it may come from memory, where files were read a moment ago.
    """
    ranks = device_count(config.trainer.devices)
    threads = replace(config.data, num_workers=config.data.num_workers * ranks)
    one_rank = replace(config.trainer, devices=1)
    data = _data_module(replace(config, data=threads, trainer=one_rank, tokens_per_step=None))
    data.setup()
    started, read = time.perf_counter(), 0
    for count, num_bytes in enumerate(_read_bytes(data), start=1):
        read += num_bytes
        if count >= _MEASURED_WINDOWS or time.perf_counter() - started > _MEASURED_S:
            break
    return read / (time.perf_counter() - started) if read else None


def _read_bytes(data: ShardDataModule) -> Iterator[int]:
    for window in data.train_dataloader():
        yield window.read_bytes


def _quietly(_: str) -> None:
    """Progress is not shown."""
