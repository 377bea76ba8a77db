"""Decide everything about an export before a byte is written, or refuse it with every reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3.errors import ConfigError
from eagle3.names import ExportTarget
from eagle3.serving import sglang, speculators, vllm
from eagle3.serving.config import ExportConfig
from eagle3.serving.layer_ids import SglangIds, check_entering, sglang_ids
from eagle3.serving.layout import OFFSETS, SELECTED, name_table
from eagle3.serving.llama_form import layer_fields
from eagle3.serving.source import ExportSource
from eagle3.serving.versions import (
    NEWEST_SGLANG,
    NEWEST_VLLM,
    OLDEST_SGLANG,
    OLDEST_VLLM,
    Version,
    parse,
    show,
)


@dataclass(frozen=True, eq=False)
class ExportPlan:
    """What the files will hold."""

    target: ExportTarget
    config: dict[str, Any]
    """Content of ``config.json``."""
    tensors: dict[str, Tensor]
    """By name in the file; without the embedding."""
    sglang: SglangIds | None
    """Null: not made for SGLang."""
    releases: tuple[tuple[str, Version], ...]
    """Engines and releases to prove it for: the oldest and the newest that are to serve it."""
    serves: tuple[str, ...]
    """Engines and releases that serve it, for people."""
    verifier_name: str
    warnings: tuple[str, ...]


def plan_export(source: ExportSource, settings: ExportConfig) -> ExportPlan:
    """Layer ids, configuration and tensors for ``settings.target``.

    Raises:
        ConfigError: an engine would serve it wrongly; a line per reason, with what could serve it.
    """
    oldest_sglang = parse("min_sglang", settings.min_sglang, OLDEST_SGLANG)
    oldest_vllm = parse("min_vllm", settings.min_vllm, OLDEST_VLLM)
    target, model = settings.target, source.config.model
    check_entering(source.aux_layer_ids, model.num_aux_layers, source.verifier.num_layers)
    reasons = list(_refusals(source, settings, oldest_sglang))
    if reasons:
        raise ConfigError(
            "\n       ".join([f"{source.label} is not exported for target={target}:", *reasons])
        )
    ids = None
    if _for_sglang(target):
        assert source.verifier.architecture is not None
        ids = sglang_ids(
            source.aux_layer_ids,
            source.verifier.architecture,
            source.verifier.num_layers,
            oldest_sglang,
        )
    name = settings.served_verifier or source.verifier.name
    releases: list[tuple[str, Version]] = []
    serves = []
    if ids is not None:
        serves.append(f"SGLang {ids.releases}")
        newest = ids.last or max(NEWEST_SGLANG, ids.first)
        releases += [("sglang", version) for version in sorted({ids.first, newest})]
    if target is not ExportTarget.sglang:
        serves.append(f"vLLM {show(oldest_vllm)} and later (known: {show(NEWEST_VLLM)})")
        releases.append(("vllm", oldest_vllm))
    return ExportPlan(
        target=target,
        config=_config(source, settings, ids, name),
        tensors=_tensors(source, settings),
        sglang=ids,
        releases=tuple(releases),
        serves=tuple(serves),
        verifier_name=name,
        warnings=(*(ids.notes if ids else ()), *_warnings(source)),
    )


def longest_trained(source: ExportSource) -> int | None:
    """Tokens of the longest context that was trained; null: not recorded."""
    lengths = source.recorded.get("lengths")
    return None if lengths is None else int(lengths["longest_trained"])


def _for_sglang(target: ExportTarget) -> bool:
    return target in (ExportTarget.both, ExportTarget.sglang)


def _refusals(source: ExportSource, settings: ExportConfig, oldest: Version) -> Iterator[str]:
    model, target = source.config.model, settings.target
    if _for_sglang(target):
        yield from sglang.refusals(model, source.norms, oldest)
    if model.sliding_window is not None:
        yield (
            f"model.sliding_window={model.sliding_window}: no engine is known to give the drafter "
            "a window, it would attend to everything: train without"
        )
    if settings.num_speculative_tokens < 1:
        yield f"num_speculative_tokens={settings.num_speculative_tokens}: expected 1 or more"


def _warnings(source: ExportSource) -> Iterator[str]:
    limit, longest = source.config.model.max_position_embeddings, longest_trained(source)
    if source.step is None:
        yield "untrained: for trying the way to the server only, it accepts next to nothing"
    elif longest is None:
        yield "the checkpoint does not say how long its documents were: acceptance may fall beyond"
    elif longest < limit:
        yield (
            f"max_position_embeddings={limit:,}, but the longest trained context has "
            f"{longest:,} tokens: acceptance may fall to nothing beyond it"
        )
    if source.verifier.quantization is not None:
        yield (
            f"states were captured from {source.verifier.quantization} weights: serve the verifier "
            "quantised alike, other weights give other states"
        )


def _config(
    source: ExportSource, settings: ExportConfig, ids: SglangIds | None, name: str
) -> dict[str, Any]:
    model, entering = source.config.model, source.aux_layer_ids
    assert source.verifier.architecture is not None
    if settings.target is ExportTarget.speculators:
        return speculators.content(
            model,
            source.norms,
            entering,
            (name, source.verifier.architecture),
            settings.num_speculative_tokens,
            settings.dtype,
        )
    return {
        "architectures": [vllm.ARCHITECTURES[model.arch]],
        **layer_fields(model, settings.dtype),
        "draft_vocab_size": model.draft_vocab_size,
        "num_aux_hidden_states": model.num_aux_layers,
        "bias": False,
        **asdict(source.norms),
        # SGLang does not look here, and warm starts do
        **vllm.fields(entering),
        **(sglang.fields(ids.ids) if ids is not None else {}),
    }


def _tensors(source: ExportSource, settings: ExportConfig) -> dict[str, Tensor]:
    dtype: torch.dtype = getattr(torch, settings.dtype)
    ours = {name: tensor.to(dtype).contiguous() for name, tensor in source.tensors.items()}
    vocab = source.vocab
    if vocab.draft_size < vocab.verifier_size:  # vLLM stops at a map that maps nothing
        ours |= {OFFSETS: vocab.d2t, SELECTED: vocab.t2d}
    table = name_table(settings.target, ours)
    return {table.to_file[name]: tensor for name, tensor in ours.items()}
