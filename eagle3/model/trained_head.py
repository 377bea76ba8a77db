"""Read a trained drafter from disk: its tensors under our names, and what is said beside them.

Three forms are told apart by their tensor names::

    drafter.layer.*   a checkpoint of this package (.ckpt), with its settings in it
    midlayer.*        SpecForge and heads made for SGLang, settings in config.json
    layers.0.*        speculators, settings in config.json, nested

Tensors only: nothing in a file is run.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle3.data.vocab import VocabMap
from eagle3.data.vocab_files import check_consistency
from eagle3.errors import ConfigError, DataError
from eagle3.model.layers import NormLayout
from eagle3.names import NormPreset

CHECKPOINT = "eagle3 checkpoint"
SPECFORGE = "SpecForge head"
SPECULATORS = "speculators head"
LM_HEAD = "lm_head.weight"

_PREFIXES = {CHECKPOINT: "drafter.", SPECFORGE: "midlayer.", SPECULATORS: "layers.0."}
_SAME_NAME = (
    "model.hidden_size",
    "model.intermediate_size",
    "model.num_attention_heads",
    "model.num_key_value_heads",
    "model.head_dim",
    "model.rms_norm_eps",
)
"""Settings that a Llama configuration calls by the same name."""
_ROPE_KEYS = (
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
)
_OURS = (*_SAME_NAME, "model.arch", "model.sliding_window")


@dataclass(frozen=True, eq=False)
class TrainedHead:
    """Tensors of a drafter by our names, and what its maker said of it."""

    path: Path
    kind: str
    """One of the three forms."""
    tensors: dict[str, Tensor]
    """Parameters, ``d2t`` and ``t2d`` where stored, and names that we do not know."""
    names: dict[str, str]
    """Our name to the name in the file."""
    stated: dict[str, Any]
    """Settings of the drafter by their key in our configuration; without those left unsaid."""
    norms: NormLayout | None
    """None: not said, there is no config.json."""
    aux_layer_ids: tuple[int, ...] | None
    """Layers that its states enter; None: not said, or said in SGLang's ambiguous numbering."""

    def name_in_file(self, ours: str) -> str:
        """Name of one of our tensors in the file, also of one that it lacks."""
        if self.kind == CHECKPOINT:
            return _PREFIXES[CHECKPOINT] + ours
        if ours.startswith("layer."):
            return _PREFIXES[self.kind] + ours.removeprefix("layer.")
        return ours

    def vocab_map(self, verifier_size: int) -> VocabMap:
        """Its draft vocabulary within ``verifier_size`` tokens; a missing ``t2d`` follows from d2t.

        Raises:
            ConfigError: it is of a verifier with another vocabulary, or has no ``d2t``.
            DataError: ``d2t`` and ``t2d`` contradict each other or the head's rows.
        """
        d2t, t2d = self.tensors.get("d2t"), self.tensors.get("t2d")
        rows = len(self.tensors.get(LM_HEAD, ()))
        if d2t is None:
            if rows == verifier_size:
                return VocabMap.identity(verifier_size)
            raise ConfigError(
                f"{self.path}: found {rows} rows of {LM_HEAD} and no d2t, expected d2t to say "
                "which tokens they are: give the head with its vocabulary map"
            )
        selected = d2t.long() + torch.arange(len(d2t))
        if t2d is None:
            t2d = VocabMap.from_selected(selected, verifier_size).t2d
        if len(t2d) != verifier_size or len(d2t) != rows:
            raise ConfigError(
                f"{self.path}: found d2t [{len(d2t)}], t2d [{len(t2d)}] and {rows} rows of "
                f"{LM_HEAD}, expected t2d [{verifier_size}] (model.vocab_size) and as many rows "
                "as d2t: give a head that was trained for this verifier"
            )
        vocab = VocabMap(d2t.long(), t2d.bool())
        check_consistency(vocab, self.path)
        return vocab


def read_trained_head(path: Path) -> TrainedHead:
    """Read a checkpoint, the file of a head, or the directory of one with its ``config.json``.

    Raises:
        DataError: it cannot be read as tensors, or its names are of none of the three forms.
    """
    tensors, saved = _read_tensors(path)
    kind = CHECKPOINT if saved is not None else _kind(tensors, path)
    renamed, names = _rename(tensors, kind, path)
    head = TrainedHead(path, kind, renamed, names, {}, None, None)
    if saved is not None:
        model = saved["config"]["model"]
        return replace(
            head,
            stated=_stated_by_us(model),
            norms=NormLayout.preset(NormPreset(model["norm_layout"])),
            aux_layer_ids=tuple(saved["aux_layer_ids"]),
        )
    config = _read_config(path)
    if config is None:
        return head
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    return replace(
        head,
        stated=_stated_by_config(config),
        norms=_norms(config, path),
        aux_layer_ids=None if ids is None else tuple(ids),
    )


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Tensors by the names of the file, and what our own checkpoints say beside them."""
    tensors: dict[str, Tensor] = {}
    saved = None
    for file in _files(path):
        content = _load(file)
        if isinstance(content.get("state_dict"), dict) and isinstance(content.get("eagle3"), dict):
            content, saved = content["state_dict"], content["eagle3"]
        twice = sorted(set(tensors) & set(content))
        if twice:
            raise DataError(
                f"{file}: found {', '.join(twice)} once more, expected every tensor in one file "
                f"of {path}: leave the files of one head there"
            )
        tensors |= {name: value for name, value in content.items() if isinstance(value, Tensor)}
    return tensors, saved


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    for pattern in ("*.safetensors", "*.bin"):
        found = sorted(path.glob(pattern))
        if found:
            return found
    present = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    raise DataError(
        f"{path}: found {', '.join(present[:5]) or 'nothing'}, expected *.safetensors or *.bin: "
        "set paths.init to the directory of a head, or to a checkpoint such as "
        "RUN/checkpoints/best.ckpt"
    )


def _load(file: Path) -> dict[str, Any]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        # a checkpoint is three times as large as its weights, and only these are touched
        mapped = zipfile.is_zipfile(file)
        content = torch.load(file, map_location="cpu", mmap=mapped, weights_only=True)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{file}: cannot be read ({error}); copy it again") from error
    except Exception as error:  # a damaged or foreign file may fail anywhere in the unpickler
        raise DataError(
            f"{file}: cannot be loaded as tensors only ({type(error).__name__}), expected a head "
            "in safetensors or torch.save form; other objects in a file are not run"
        ) from error
    return content if isinstance(content, dict) else {}


def _kind(tensors: Mapping[str, Tensor], path: Path) -> str:
    for kind in (SPECFORGE, SPECULATORS):
        if any(name.startswith(_PREFIXES[kind]) for name in tensors):
            return kind
    raise DataError(
        f"{path}: found {', '.join(sorted(tensors)[:5]) or 'no tensor'}, expected midlayer.* "
        "(SpecForge), layers.0.* (speculators) or a checkpoint of this package: export the head "
        "in one of these forms"
    )


def _rename(
    tensors: Mapping[str, Tensor], kind: str, path: Path
) -> tuple[dict[str, Tensor], dict[str, str]]:
    renamed: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    for name, tensor in tensors.items():
        ours = _our_name(name, kind)
        if ours in renamed:
            raise DataError(
                f"{path}: found {names[ours]} and {name}, expected one of them: both are our "
                f"{ours}. Remove that which was not trained"
            )
        renamed[ours], names[ours] = tensor, name
    return renamed, names


def _our_name(name: str, kind: str) -> str:
    if kind == CHECKPOINT:
        return name.removeprefix(_PREFIXES[CHECKPOINT])
    for foreign in (SPECFORGE, SPECULATORS):
        if name.startswith(_PREFIXES[foreign]):
            return f"layer.{name.removeprefix(_PREFIXES[foreign])}"
    return name


def _read_config(path: Path) -> dict[str, Any] | None:
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: is no JSON ({error}); copy the head's file again") from error
    if not isinstance(content, dict):
        raise DataError(f"{file}: holds no JSON object; copy the head's file again")
    return content


def _stated_by_us(model: Mapping[str, Any]) -> dict[str, Any]:
    stated = {key: model[key.removeprefix("model.")] for key in _OURS}
    return stated | {f"model.rope.{key}": value for key, value in model["rope"].items()}


def _stated_by_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a Hugging Face configuration; speculators nests those of the layer."""
    layer = config.get("transformer_layer_config") or config
    stated = {key: layer.get(key.removeprefix("model.")) for key in _SAME_NAME}
    stated |= dict(_stated_rope(layer))
    return {key: value for key, value in stated.items() if value is not None}


def _stated_rope(layer: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """New configurations say it in ``rope_parameters``, old ones in two keys."""
    rope = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    yield "model.rope.theta", rope.get("rope_theta", layer.get("rope_theta"))
    kind = rope.get("rope_type", rope.get("type", "default"))
    yield "model.rope.type", kind
    if kind != "default":
        yield from ((f"model.rope.{key}", rope.get(key)) for key in _ROPE_KEYS)


def _norms(config: Mapping[str, Any], path: Path) -> NormLayout:
    """What both engines read, the nested key first; all are off where nothing is said."""
    said = {**config, **(config.get("eagle_config") or {})}
    try:
        return NormLayout(
            norm_before_residual=bool(said.get("norm_before_residual")),
            norm_before_fc=bool(said.get("norm_before_fc")),
            fc_norm=bool(said.get("fc_norm") or said.get("use_aux_norm")),
            norm_output=bool(said.get("norm_output")),
        )
    except ValueError as error:
        raise DataError(f"{path}: config.json: {error}; correct it as the head has it") from error
