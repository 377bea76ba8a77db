"""Proof of an export: what engines would load from it is the drafter that was trained."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from eagle3.config import ComputeConfig
from eagle3.data.batch import PackedBatch
from eagle3.demo import source_paths
from eagle3.distributed import Ranks
from eagle3.errors import DataError, UserError
from eagle3.inputs import build_data
from eagle3.model.drafter import Drafter
from eagle3.model.trained_head import read_trained_head
from eagle3.model.ttt import unroll
from eagle3.names import Arrival, CaptureSource
from eagle3.serving import independent_reader as reader
from eagle3.serving.embedding import embedding_rows
from eagle3.serving.independent_forward import ServedDrafter
from eagle3.serving.plan import ExportPlan
from eagle3.serving.source import ExportSource
from eagle3.serving.versions import show

ROWS, STEPS = 48, 3
"""Of the comparison of logits: rows of one document, draft tokens a round."""
TOLERANCE = 1e-4
"""Of logits, over the largest of them; both sides compute in float32."""


@dataclass(frozen=True)
class Check:
    """One line of the proof."""

    name: str
    holds: bool
    found: str


@dataclass(frozen=True, eq=False)
class ProofStates:
    """What both sides are fed."""

    batch: PackedBatch
    """One document; its token ids count the rows of ``embeds``."""
    embeds: Tensor
    """[L, H], float32."""
    origin: str


def prove(directory: Path, source: ExportSource, plan: ExportPlan) -> list[Check]:
    """Every check, those after a failed reading left out."""
    loaded: dict[str, reader.Loaded] = {}
    checks = []
    for engine, version in plan.releases:
        name = f"{engine} {show(version)}: names, shapes, flags"
        try:
            loaded[engine] = reader.read(directory, engine, version)
        except reader.WrongExportError as error:
            checks.append(Check(name, False, str(error)))
            continue
        checks.append(Check(name, True, f"{len(loaded[engine].weights)} tensors, none dropped"))
        checks.append(_layers(directory, engine, version, source))
    if not all(check.holds for check in checks):
        return checks
    states, dtype = proof_states(source), _dtype(plan)
    rounded = drafter_logits(source, dtype, states)
    for engine, drafter in loaded.items():
        checks.append(_vocabulary(engine, drafter, source))
        checks.append(_logits(engine, drafter, rounded, states))
    checks += _import(directory, source, dtype)
    checks.append(_rounding(drafter_logits(source, torch.float32, states)[0], rounded[0], dtype))
    return checks


def proof_states(source: ExportSource) -> ProofStates:
    """The first rows of the run's own shards, or made-up ones where they are out of reach."""
    model = source.config.model
    generator = torch.Generator().manual_seed(0)
    try:
        batch, origin = _real_states(source), "real states"
    except (UserError, OSError) as error:
        width = (ROWS, model.num_aux_layers * model.hidden_size)
        ids = torch.randint(0, model.vocab_size, (ROWS,), generator=generator)
        batch = PackedBatch.of_rows(ids, torch.randn(width, generator=generator))
        reason = str(error).splitlines()[0]
        origin = f"made-up states ({reason:.90})"
    if source.verifier_directory is not None and any(
        source.verifier_directory.glob("*.safetensors")
    ):
        shape = (model.vocab_size, model.hidden_size)
        embeds = embedding_rows(source.verifier_directory, batch.input_ids, shape).float()
    else:
        embeds = torch.randn(len(batch), model.hidden_size, generator=generator)
    return ProofStates(replace(batch, input_ids=torch.arange(len(batch))), embeds, origin)


def drafter_logits(source: ExportSource, dtype: torch.dtype, states: ProofStates) -> list[Tensor]:
    """Our chain on these states, [L, D] a step, in float32 with weights rounded to ``dtype``."""
    with torch.device("meta"):  # filled below; a large one would take its memory twice
        drafter = Drafter(source.config.model, source.norms)
    weights = {name: tensor.to(dtype).float() for name, tensor in source.tensors.items()}
    drafter.load_state_dict(weights, strict=False, assign=True)
    drafter.embed_tokens = states.embeds
    batch = states.batch
    with torch.inference_mode():
        steps = unroll(drafter, batch, batch.aux_hidden, STEPS, ComputeConfig.reference())
        return [drafter.logits(hidden) for hidden in steps]


def _real_states(source: ExportSource) -> PackedBatch:
    """The longest of the first documents, without noise, cut to :data:`ROWS`."""
    config = source.config
    named = config.paths.verifier and (config.paths.shards or config.data.mixture)
    if config.capture.source is CaptureSource.off and not named:
        raise DataError("no shards are named")
    with tempfile.TemporaryDirectory() as cache:
        few = replace(
            config,
            data=replace(config.data, max_samples=4, val_ratio=0.0, arrival=Arrival.complete),
            paths=replace(config.paths, cache=cache, val_shards=None),
            capture=replace(config.capture, source=CaptureSource.off),
        )
        paths = source_paths(config)
        data = build_data(few, paths, Ranks(), pin_memory=False)
        data.setup()
        batch = data.sample_batch(4 * ROWS)
    document = int(batch.document_ids.bincount().argmax())
    rows = (batch.document_ids == document).nonzero()[:ROWS, 0]
    return PackedBatch.of_rows(batch.input_ids[rows], batch.aux_hidden[rows].float())


def _layers(directory: Path, engine: str, version: tuple[int, ...], source: ExportSource) -> Check:
    config = reader.read_config(directory)
    assert source.verifier.architecture is not None
    found = reader.captured_layers(
        config, engine, version, source.verifier.architecture, source.verifier.num_layers
    )
    return Check(
        f"{engine} {show(version)}: layers captured",
        found == source.aux_layer_ids,
        f"entering {list(found)}, trained on {list(source.aux_layer_ids)}",
    )


def _vocabulary(engine: str, drafter: reader.Loaded, source: ExportSource) -> Check:
    same = torch.equal(drafter.verifier_ids(), source.vocab.selected)
    found = f"{source.vocab.draft_size:,} of {source.vocab.verifier_size:,} tokens"
    return Check(f"{engine}: draft vocabulary", same, found if same else "another map")


def _logits(engine: str, loaded: reader.Loaded, ours: list[Tensor], states: ProofStates) -> Check:
    """Only rows whose chain stays in the document: an engine never drafts from others."""
    served = ServedDrafter(loaded.config, loaded.weights)
    theirs = served.chain(states.embeds, states.batch.aux_hidden, STEPS)
    worst = 0.0
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        rows = max(len(a) - step, 1)
        worst = max(worst, _relative(a[:rows], b[:rows]))
    where = f"{len(states.batch)} rows, {STEPS} draft tokens, {states.origin}"
    return Check(f"{engine}: logits", worst <= TOLERANCE, f"differ by {worst:.1e}; {where}")


def _relative(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference over the largest logit; infinite where one is not finite."""
    difference = float((ours - theirs).abs().max() / ours.abs().max().clamp(min=1e-30))
    return difference if difference == difference else float("inf")


def _import(directory: Path, source: ExportSource, dtype: torch.dtype) -> Iterator[Check]:
    """A warm start from the directory has the same weights, settings and layers."""
    head = read_trained_head(directory)
    wrong = [
        name
        for name, tensor in source.tensors.items()
        if name not in head.tensors or not torch.equal(head.tensors[name], tensor.to(dtype))
    ]
    yield Check("paths.init: weights", not wrong, ", ".join(wrong) or "the same bits")
    same = (head.norms, head.aux_layer_ids) == (source.norms, source.aux_layer_ids)
    found = f"{head.norms}, layers {head.aux_layer_ids}"
    yield Check("paths.init: settings", same, "the same" if same else found)


def _rounding(exact: Tensor, rounded: Tensor, dtype: torch.dtype) -> Check:
    """What the dtype of the export costs, for information."""
    agree = float((exact.argmax(-1) == rounded.argmax(-1)).float().mean())
    return Check(
        f"rounding to {str(dtype).removeprefix('torch.')}",
        True,
        f"logits differ by {_relative(exact, rounded):.1e}, first draft token the same in "
        f"{agree:.1%}",
    )


def _dtype(plan: ExportPlan) -> torch.dtype:
    return next(t.dtype for t in plan.tensors.values() if t.is_floating_point())
