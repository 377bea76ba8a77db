"""Start a drafter from a trained head: the same function, or an error that says what differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3.config import ModelConfig
from eagle3.data.vocab import VocabMap
from eagle3.errors import ConfigError
from eagle3.model.drafter import Drafter
from eagle3.model.layers import NormLayout
from eagle3.model.trained_head import LM_HEAD, TrainedHead
from eagle3.model.weights import VerifierWeights
from eagle3.names import NormPreset

_MAP_KEYS = ("d2t", "t2d")
_EMBEDDING = "embed_tokens.weight"
_LEFT = (_EMBEDDING, "verifier_lm_head.weight", "verifier_norm.weight")
"""Frozen tensors of the verifier that some heads carry along."""
_ROTARY = ".rotary_emb."
"""Buffers that follow from the configuration."""
_CHUNK_ROWS = 8192
_ROUNDING = 2**-7
"""Relative, of one bfloat16 step."""


@dataclass(frozen=True)
class WarmStart:
    """What a drafter has taken from a trained head."""

    lines: tuple[str, ...]
    """For people: what was taken, converted or left."""
    sources: dict[str, str]
    """Of each parameter, for the table of parameters."""


def warm_start(drafter: Drafter, head: TrainedHead, verifier: VerifierWeights) -> WarmStart:
    """Give ``drafter`` the weights of ``head``.

    Rows of ``lm_head`` go by verifier token id, so the run's vocabulary map may be another one;
    tokens that the head did not draft start at the verifier's own rows.

    Raises:
        ConfigError: one line per setting, norm or tensor that does not fit; nothing is changed.
        DataError: the head's vocabulary map contradicts itself.
    """
    _refuse(drafter, head)
    theirs = head.vocab_map(drafter.config.vocab_size)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name != LM_HEAD:
                parameter.copy_(head.tensors[name])
        taken = _copy_rows(drafter, head.tensors[LM_HEAD], theirs, verifier.head)
    label = f"{head.kind} {head.path}"
    sources = dict.fromkeys(dict(drafter.named_parameters()), label)
    fresh = drafter.config.draft_vocab_size - taken
    if fresh:
        sources[LM_HEAD] = f"{label}, {fresh:,} rows of the verifier"
    lines = (
        _taken_line(drafter, head),
        _rows_line(drafter, theirs, taken),
        *_left_lines(head, verifier),
    )
    return WarmStart(lines, sources)


def check_aux_layers(head: TrainedHead, aux_layer_ids: Sequence[int]) -> str:
    """Compare the layers that the head reads with those of the shards; returns a line about it.

    Raises:
        ConfigError: the head says which, and the shards hold others.
    """
    found = tuple(aux_layer_ids)
    if head.aux_layer_ids is None:
        return (
            "start: the head does not say for certain which layers its states enter; the shards' "
            f"{list(found)} are taken to be those it was trained on"
        )
    if head.aux_layer_ids != found:
        raise ConfigError(
            f"{head.path}: the head reads states entering layers {list(head.aux_layer_ids)}, the "
            f"shards hold those entering {list(found)}: capture the head's layers, correct "
            "data.aux_layer_ids or their convention, or train without paths.init"
        )
    return f"start: states entering layers {list(found)}, as the head was trained on"


def _refuse(drafter: Drafter, head: TrainedHead) -> None:
    # settings first: they explain most of the names and shapes that differ
    for find in (_settings, _norms, _names, _values):
        problems = list(find(drafter, head))
        if problems:
            raise ConfigError("\n       ".join(f"{head.path}: {line}" for line in problems))


def _settings(drafter: Drafter, head: TrainedHead) -> Iterator[str]:
    for key, stated in head.stated.items():
        ours = _setting(drafter.config, key)
        if ours != stated:
            yield f"the head was trained with {key}={stated}, found {ours}: set {key}={stated}"


def _setting(config: ModelConfig, key: str) -> Any:
    value: Any = asdict(config)
    for part in key.split(".")[1:]:
        value = value.get(part)
    return value


def _norms(drafter: Drafter, head: TrainedHead) -> Iterator[str]:
    theirs = head.norms or _visible_norms(head, drafter.norms)
    if theirs == drafter.norms:
        return
    flags = ", ".join(name for name, on in asdict(theirs).items() if on) or "no further norm"
    fitting = [p for p in NormPreset if NormLayout.preset(p) == theirs]
    todo = (
        f"set model.norm_layout={fitting[0]}"
        if fitting
        else "no model.norm_layout is like that, so it can only be trained where it came from"
    )
    yield f"the head has {flags}, found model.norm_layout={drafter.config.norm_layout}: {todo}"


def _visible_norms(head: TrainedHead, ours: NormLayout) -> NormLayout:
    """Tensor names tell two of the flags; ours if it has these, else the preset that does."""
    before_fc = "input_norm.weight" in head.tensors
    per_state = any(name.startswith("fc_norm.") for name in head.tensors)
    layouts = [ours, *map(NormLayout.preset, NormPreset)]
    fitting = (x for x in layouts if (x.norm_before_fc, x.fc_norm) == (before_fc, per_state))
    return next(fitting, ours)


def _names(drafter: Drafter, head: TrainedHead) -> Iterator[str]:
    wanted = set(dict(drafter.named_parameters()))
    unknown = sorted(
        head.names[name]
        for name in set(head.tensors) - wanted - {*_MAP_KEYS, *_LEFT}
        if _ROTARY not in name
    )
    biases = [name for name in unknown if name.endswith(".bias")]
    others = [name for name in unknown if name not in biases]
    missing = sorted(wanted - set(head.tensors))
    if biases:
        yield (
            f"found {', '.join(biases)}, expected none: this drafter has no bias and no setting "
            "for one; start from a head without (attention_bias, mlp_bias and bias false)"
        )
    if others:
        found = ", ".join(others)
        yield f"found unknown {found}, expected only one layer's tensors: {_hint(others)}"
    if missing:
        yield (
            f"{', '.join(map(head.name_in_file, missing))} missing, expected every weight of the "
            f"drafter: {_hint(missing)}"
        )


def _hint(names: Sequence[str]) -> str:
    if any(".q_norm." in name or ".k_norm." in name for name in names):
        return "set model.arch to llama without and to qwen3 with q_norm and k_norm"
    return "give the whole head of a Llama or Qwen3 layer, under the names of its trainer"


def _values(drafter: Drafter, head: TrainedHead) -> Iterator[str]:
    for name, parameter in drafter.named_parameters():
        tensor, shape = head.tensors[name], list(parameter.shape)
        theirs = head.names[name]
        # with another map it has as many rows as that
        fits = tensor.shape[1:] == parameter.shape[1:] and tensor.ndim == parameter.ndim
        if not fits or (name != LM_HEAD and list(tensor.shape) != shape):
            yield (
                f"{theirs} is {list(tensor.shape)}, expected {shape}: set model.* to the sizes of "
                "the head"
            )
        elif not tensor.is_floating_point() or tensor.element_size() < 2:
            yield (
                f"{theirs} is {tensor.dtype}, expected float32, bfloat16 or float16: quantised "
                "weights are not read without their scales"
            )
        elif not bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all()):
            yield f"{theirs} holds NaN or inf, expected trained weights: copy the file again"


def _copy_rows(drafter: Drafter, rows: Tensor, theirs: VocabMap, verifier_head: Tensor) -> int:
    """Fill ``lm_head`` by verifier token id; returns how many rows are the head's."""
    selected = VocabMap(drafter.d2t, drafter.t2d).selected
    known = theirs.covers(selected)
    weight = drafter.lm_head.weight
    weight[known] = rows[torch.searchsorted(theirs.selected, selected[known])].to(weight.dtype)
    weight[~known] = verifier_head[selected[~known]].to(weight.dtype)
    return int(known.sum())


def _taken_line(drafter: Drafter, head: TrainedHead) -> str:
    dtypes = Counter(
        str(head.tensors[name].dtype).removeprefix("torch.")
        for name, _ in drafter.named_parameters()
    )
    ours = str(drafter.fc.weight.dtype).removeprefix("torch.")
    kinds = ", ".join(
        f"{n} in {kind}" + ("" if kind == ours else f", converted to {ours}")
        for kind, n in dtypes.items()
    )
    unsaid = "" if head.norms is not None else (
        "; no config.json beside it, so heads, rotary embedding and norm layout are taken to be "
        "those of model.*"
    )  # fmt: skip
    return f"start: {head.kind} {head.path}: tensors taken: {kinds}{unsaid}"


def _rows_line(drafter: Drafter, theirs: VocabMap, taken: int) -> str:
    size = drafter.config.draft_vocab_size
    if torch.equal(theirs.t2d, drafter.t2d):
        return f"start: {LM_HEAD}: all {size:,} rows, the head's vocabulary map is the run's"
    return (
        f"start: {LM_HEAD}: {taken:,} of {size:,} rows by verifier token id, {size - taken:,} "
        f"from the verifier's head; {theirs.draft_size - taken:,} rows of the head left"
    )


def _left_lines(head: TrainedHead, verifier: VerifierWeights) -> Iterator[str]:
    left = sorted(name for name in head.tensors if name in _LEFT or _ROTARY in name)
    if left:
        names = ", ".join(head.names[name] for name in left)
        yield f"start: left: {names} (the verifier's, and what follows from model.*, are used)"
    if _EMBEDDING in head.tensors:
        other = _other_rows(head.tensors[_EMBEDDING], verifier.embed_tokens)
        if other:
            yield (
                f"warning: {head.names[_EMBEDDING]} of the head is not the verifier's in {other} "
                "rows: it was trained with an embedding of its own, which is not used here"
            )


def _other_rows(theirs: Tensor, ours: Tensor) -> str:
    """How many rows differ by more than rounding; empty: none."""
    if theirs.shape != ours.shape:
        return "all"
    different = 0
    for start in range(0, len(ours), _CHUNK_ROWS):
        a, b = (x[start : start + _CHUNK_ROWS].float() for x in (theirs, ours))
        near = torch.isclose(a, b, rtol=_ROUNDING, atol=0.0)
        different += int((~near.all(dim=1)).sum())
    return f"{different:,}" if different else ""
