"""Everything a run reads, checked and loaded in order: data, vocabulary map, verifier, drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from eagle3.audit import noise_line, probe_last_hidden
from eagle3.checks import accumulate
from eagle3.config import Config
from eagle3.data.datamodule import DataModule, ShardDataModule
from eagle3.data.declaration import Declaration
from eagle3.data.growing_datamodule import GrowingDataModule
from eagle3.data.layout import StateLayout
from eagle3.data.settings import DataSettings
from eagle3.data.tokenizer_fingerprint import read_tokenizer
from eagle3.data.vocab import VocabMap
from eagle3.data.vocab_files import (
    MapOrigin,
    check_tokenizer,
    load_vocab_map,
    read_origin,
    save_vocab_map,
)
from eagle3.demo import SourcePaths, capture_shards, prepare_verifier, source_paths
from eagle3.distributed import Ranks
from eagle3.errors import ConfigError
from eagle3.model.build import (
    ParameterRow,
    build_drafter,
    build_verifier_head,
    check_layers,
    check_sizes,
    parameter_table,
    table_lines,
)
from eagle3.model.drafter import Drafter
from eagle3.model.trained_head import TrainedHead, read_trained_head
from eagle3.model.verifier_head import VerifierHead
from eagle3.model.warm_start import check_aux_layers, warm_start
from eagle3.model.weights import load_verifier_weights, read_verifier_config
from eagle3.names import Arrival, CaptureSource, Precision
from eagle3.provenance import Run
from eagle3.resources import resource_lines

VOCAB_FILE = "vocab_map.safetensors"
VALIDATION_FILE = "validation_samples.txt"
_PROBE_ROWS = 4096

Say = Callable[[str], None]


@dataclass(frozen=True)
class Inputs:
    """What the trainer is built from."""

    data: DataModule
    vocab: VocabMap
    drafter: Drafter
    head: VerifierHead
    vocab_coverage: float
    """Share of the supervised tokens in ``data.facts_from`` that the draft vocabulary holds."""
    epochs: int
    """Passes over the training documents."""
    total_steps: int
    """Optimizer steps of the run, from the plan of every epoch; of growing data at most."""
    parameters: list[ParameterRow]
    verifier: Path


def load_inputs(
    config: Config, run: Run, ranks: Ranks, accelerator: str, precision: Precision, say: Say
) -> Inputs:
    """Open the data first, since its mistakes are cheap to find, then the map, then weights."""
    paths = source_paths(config)
    prepare_verifier(config)
    verifier = read_verifier_config(paths.verifier)
    check_sizes(config.model, verifier)
    data = build_data(config, paths, ranks, pin_memory=accelerator == "gpu")
    data.prepare_data()
    data.setup()
    check_layers(data.description.aux_layer_ids, verifier)
    for line in data.start_lines():
        say(line)
    for line in resource_lines(
        data.bytes_per_token,
        config.max_seq_len,
        data.settings.accumulate,
        config.data.prefetch_windows,
        config.data.num_workers,
        ranks_on_host=ranks.local_world_size,
    ):
        say(line)
    counts = data.token_frequencies()
    start = _read_start(config, run, say)
    vocab, origin = _vocab_map(config, paths, data, counts, start, say)
    coverage = float(counts[vocab.t2d].sum() / counts.sum().clamp(min=1))
    say(
        f"draft vocabulary: {vocab.draft_size:,} of {vocab.verifier_size:,} tokens, "
        f"{coverage:.2%} of the supervised {data.facts_from} tokens"
    )
    if run.is_main:
        save_vocab_map(run.directory / VOCAB_FILE, vocab, origin)
        held_out = "".join(f"{sample}\n" for sample in data.validation_samples())
        (run.directory / VALIDATION_FILE).write_text(held_out, encoding="ascii")
    begun_from = start if run.checkpoint is None else _pulled_to(config)
    drafter, head, parameters = _models(config, paths, vocab, data, precision, begun_from, say)
    for line in table_lines(parameters):
        say(line)
    _probe(config, data, head, vocab, say)
    epochs = data.epochs(config.epochs)
    return Inputs(
        data=data,
        vocab=vocab,
        drafter=drafter,
        head=head,
        vocab_coverage=coverage,
        epochs=epochs,
        total_steps=data.total_steps(epochs, config.trainer.max_steps),
        parameters=parameters,
        verifier=paths.verifier,
    )


def build_data(config: Config, paths: SourcePaths, ranks: Ranks, *, pin_memory: bool) -> DataModule:
    """The data module of this rank; nothing is read yet."""
    data, model = config.data, config.model
    captures = config.capture.source is not CaptureSource.off
    ids = data.aux_layer_ids
    settings = DataSettings(
        directories=paths.shards,
        weights=paths.weights,
        val_directory=_path(config.paths.val_shards),
        cache=Path(config.paths.cache),
        arrow=_path(config.paths.arrow),
        source_labels=_path(config.paths.source_labels),
        declaration=Declaration(
            None if ids is None else tuple(ids), data.layer_id_convention, data.last_hidden
        ),
        layout=StateLayout(model.num_aux_layers, model.hidden_size, model.vocab_size),
        max_seq_len=config.max_seq_len,
        val_max_seq_len=config.val.max_seq_len,
        ttt_steps=config.ttt_steps,
        # the replay of a round looks at the gate of the row after, also with one draft a round
        draft_steps=max(config.val.draft_steps, 2),
        long_documents=data.long_documents,
        split_context_tokens=data.split_context_tokens,
        val_ratio=data.val_ratio,
        train_on=data.train_on,
        max_samples=data.max_samples,
        max_bad_samples=data.max_bad_samples,
        num_workers=data.num_workers,
        read_mode=data.read_mode,
        prefetch_windows=data.prefetch_windows,
        on_change=data.on_change,
        accumulate=accumulate(config, ranks.world_size),
        seed=config.seed,
        rank=ranks.rank,
        world_size=ranks.world_size,
        pin_memory=pin_memory,
    )
    if data.arrival is Arrival.growing:
        assert config.trainer.max_steps is not None
        return GrowingDataModule(settings, config.trainer.max_steps, data.arrival_timeout_s)
    return ShardDataModule(settings, partial(capture_shards, config, paths) if captures else None)


def _path(path: str | None) -> Path | None:
    return None if path is None else Path(path)


def _read_start(config: Config, run: Run, say: Say) -> TrainedHead | None:
    """The drafter to start from, or that to go on from, whose weights Lightning loads later."""
    if config.paths.init is None:
        return None
    if run.checkpoint is None:
        return read_trained_head(Path(config.paths.init))
    role = "is not used" if config.optim.pull_to_start == 0 else "is what weights are pulled to"
    say(f"paths.init {role}: the run goes on from {run.checkpoint}")
    return read_trained_head(run.checkpoint)


def _pulled_to(config: Config) -> TrainedHead | None:
    """The start that a run which goes on is still pulled to; Lightning loads its weights later."""
    if config.optim.pull_to_start == 0:
        return None
    assert config.paths.init is not None
    return read_trained_head(Path(config.paths.init))


def _vocab_map(
    config: Config,
    paths: SourcePaths,
    data: DataModule,
    counts: torch.Tensor,
    start: TrainedHead | None,
    say: Say,
) -> tuple[VocabMap, MapOrigin]:
    """The given map, that of the start, the identity, or the most frequent response tokens.

    Raises:
        ConfigError: the map of the start has another size than the configuration.
    """
    draft, verifier = config.model.draft_vocab_size, config.model.vocab_size
    if config.paths.vocab_map is not None:
        given = Path(config.paths.vocab_map)
        vocab = load_vocab_map(given, draft, verifier)
        say(check_tokenizer(given, paths.verifier))
        return vocab, read_origin(given)
    if start is not None:
        vocab = start.vocab_map(verifier)
        if vocab.draft_size != draft:
            raise ConfigError(
                f"{start.path}: found a vocabulary map of {vocab.draft_size} tokens, expected "
                f"model.draft_vocab_size={draft}: set it to {vocab.draft_size}, or give "
                "paths.vocab_map to draft other tokens than the head"
            )
        say(f"vocabulary map: that of {start.path}")
        return vocab, MapOrigin()
    tokenizer = read_tokenizer(paths.verifier)
    origin = MapOrigin(
        data_fingerprint=data.description.fingerprint,
        tokenizer_fingerprint=None if tokenizer is None else tokenizer.fingerprint,
        tokenizer_name=None if tokenizer is None else tokenizer.name,
        counted_tokens=int(counts.sum()),
    )
    if draft == verifier:
        return VocabMap.identity(verifier), origin
    return VocabMap.from_frequencies(counts, draft, verifier), origin


def _models(
    config: Config,
    paths: SourcePaths,
    vocab: VocabMap,
    data: DataModule,
    precision: Precision,
    start: TrainedHead | None,
    say: Say,
) -> tuple[Drafter, VerifierHead, list[ParameterRow]]:
    """Drafter and head; frozen tensors are bfloat16 where compute is, else float32."""
    frozen = torch.bfloat16 if precision is Precision.bf16_mixed else torch.float32
    weights = load_verifier_weights(paths.verifier, frozen)
    drafter = build_drafter(config.model, vocab, weights, config.seed)
    head = build_verifier_head(
        vocab, weights, data.description.last_hidden, full=config.val.full_verifier_head
    )
    rows = parameter_table(drafter, head, weights.names)
    if start is not None:
        say(check_aux_layers(start, data.description.aux_layer_ids))
        begun = warm_start(drafter, start, weights)
        for line in begun.lines:
            say(line)
        rows = [replace(row, source=begun.sources.get(row.name, row.source)) for row in rows]
    return drafter, head, rows


def _probe(config: Config, data: DataModule, head: VerifierHead, vocab: VocabMap, say: Say) -> None:
    batch = data.sample_batch(_PROBE_ROWS).trim()
    probe = probe_last_hidden(head, batch, vocab)
    for line in probe.lines():
        say(line)
    probe.check()
    if config.noise_std > 0:
        say(noise_line(batch, config.model.num_aux_layers, config.noise_std))
