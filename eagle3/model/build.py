"""Build drafter and verifier head from a configuration, a vocabulary map and verifier weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.config import ModelConfig
from eagle3.data.vocab import VocabMap
from eagle3.errors import ConfigError
from eagle3.model.drafter import Drafter
from eagle3.model.verifier_head import VerifierHead
from eagle3.model.weights import VerifierConfig, VerifierWeights
from eagle3.names import BodyInit, LastHidden, LmHeadInit

_LENS_NOISE = 0.3
"""Random part of ``fc`` beside the identity, over a plain random start."""


@dataclass(frozen=True)
class ParameterRow:
    """One line of the table that answers 'what is trained?'."""

    name: str
    shape: tuple[int, ...]
    count: int
    dtype: str
    trainable: bool
    source: str


def check_sizes(config: ModelConfig, verifier: VerifierConfig) -> None:
    """Stop when the drafter's widths are not the verifier's."""
    for key in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(config, key), getattr(verifier, key)
        if ours != theirs:
            raise ConfigError(
                f"model.{key}={ours}, but the verifier's config.json says {theirs}: set "
                f"model.{key}={theirs} or point paths.verifier at the right model"
            )


def check_layers(aux_layer_ids: Sequence[int], verifier: VerifierConfig) -> None:
    """Stop when the data name a layer (*entering*) that the verifier does not have."""
    if max(aux_layer_ids) > verifier.num_layers:
        raise ConfigError(
            f"data.aux_layer_ids: the shards hold states entering layers {list(aux_layer_ids)}, "
            f"but the verifier has {verifier.num_layers} layers: correct the ids or their "
            "convention, or point paths.verifier at the model they come from"
        )


def build_drafter(
    config: ModelConfig, vocab: VocabMap, verifier: VerifierWeights, seed: int
) -> Drafter:
    """A fresh drafter: random weights from ``seed``, embedding and draft head from the verifier."""
    drafter = Drafter(config)
    drafter.init_weights(torch.Generator().manual_seed(seed))
    drafter.embed_tokens = verifier.embed_tokens
    drafter.d2t, drafter.t2d = vocab.d2t.clone(), vocab.t2d.clone()
    with torch.no_grad():
        if config.lm_head_init is LmHeadInit.verifier:
            drafter.lm_head.weight.copy_(verifier.head[vocab.selected])
        if config.body_init is BodyInit.logit_lens:
            drafter.fc.weight.mul_(_LENS_NOISE)
            drafter.fc.weight[:, -config.hidden_size :] += torch.eye(config.hidden_size)
            drafter.norm.weight.copy_(verifier.norm)
    return drafter


def build_verifier_head(
    vocab: VocabMap, verifier: VerifierWeights, last_hidden: LastHidden, full: bool
) -> VerifierHead:
    """The verifier's head cut to the draft vocabulary; ``full`` keeps the whole head beside it."""
    return VerifierHead(
        verifier.norm,
        verifier.head[vocab.selected],
        eps=verifier.config.rms_norm_eps,
        last_hidden=last_hidden,
        full_weight=verifier.head if full else None,
    )


def parameter_table(
    drafter: Drafter, head: VerifierHead, names: dict[str, str]
) -> list[ParameterRow]:
    """Every tensor with its source: ``names`` are the verifier's checkpoint names."""
    head_rows = f"verifier {names['head']}, draft rows"
    sources = _sources(drafter.config, head_rows, names["norm"])
    rows = [
        _row("embed_tokens", drafter.embed_tokens, False, f"verifier {names['embed_tokens']}"),
        _row("verifier_head", head.weight, False, head_rows),
        _row("verifier_norm", head.norm_weight, False, f"verifier {names['norm']}"),
    ]
    for name, parameter in drafter.named_parameters():
        source = sources.get(name, "ones" if parameter.ndim == 1 else "random")
        rows.append(_row(name, parameter, parameter.requires_grad, source))
    return rows


def _sources(config: ModelConfig, head_rows: str, norm: str) -> dict[str, str]:
    """Parameters that start neither at one nor at random."""
    sources = {}
    if config.lm_head_init is LmHeadInit.verifier:
        sources["lm_head.weight"] = head_rows
    if config.body_init is BodyInit.logit_lens:
        sources["fc.weight"] = "identity on the last aux layer + random"
        sources["norm.weight"] = f"verifier {norm}"
    return sources


def _row(name: str, tensor: Tensor, trainable: bool, source: str) -> ParameterRow:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return ParameterRow(name, tuple(tensor.shape), tensor.numel(), dtype, trainable, source)


def table_lines(rows: list[ParameterRow]) -> list[str]:
    """The table as text, with totals."""
    head = f"{'parameter':<40} {'shape':>16} {'count':>14} {'dtype':<9} {'':<9} source"
    out = [head]
    for row in rows:
        shape = "x".join(map(str, row.shape))
        kind = "trainable" if row.trainable else "frozen"
        out.append(
            f"{row.name:<40} {shape:>16} {row.count:>14,} {row.dtype:<9} {kind:<9} {row.source}"
        )
    trained = sum(row.count for row in rows if row.trainable)
    frozen = sum(row.count for row in rows if not row.trainable)
    out.append(f"trainable {trained:,} in all, frozen {frozen:,}")
    return out
