"""What SGLang and vLLM make of a directory with an EAGLE-3 drafter, without either of them.

Stand-alone on purpose: it shares no code with the exporter whose files it judges, so that one
mistake is not made twice. Each rule is one of the engines' readers (``models/llama_eagle3.py`` of
SGLang 0.5.9 to 0.5.23 and of vLLM 0.33; vLLM's ``configs/speculators/algos.py``). Where an engine
would drop a tensor or ignore a flag without a word, this reader refuses::

    python independent_reader.py DIR                  both engines, their newest known version
    python independent_reader.py DIR sglang 0.5.12
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

SGLANG, VLLM = "sglang", "vllm"
NEWEST = {SGLANG: (0, 5, 23), VLLM: (0, 33, 0)}
"""Newest version of each engine whose reader was studied."""

_IDS = "eagle_aux_hidden_state_layer_ids"
_PLAIN_CLASSES = ("LlamaForCausalLMEagle3",)
_VLLM_CLASSES = (*_PLAIN_CLASSES, "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM")
_QWEN3 = "Eagle3Qwen3ForCausalLM"
_DEEPSEEK_RULE = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "KimiK25ForConditionalGeneration",
    "Glm4MoeLiteForCausalLM",
)
_SINCE = {"fc_norm": (0, 5, 12), "norm_output": (0, 5, 12), "norm_before_fc": (0, 5, 18)}
"""SGLang releases known to read a flag; older ones ignore it."""
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "draft_vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


class WrongExportError(ValueError):
    """The engine would not serve what was trained; the message has a line per reason."""


@dataclass(frozen=True, eq=False)
class Loaded:
    """A drafter as an engine holds it after loading; what it computes: ``independent_forward``."""

    config: dict[str, Any]
    """Flat, also where the file nests it."""
    weights: dict[str, Tensor]
    """By parameter, the layer as ``layers.0``."""

    def verifier_ids(self) -> Tensor:
        """int64 [D]: the verifier token that each draft id stands for."""
        ids = torch.arange(self.config["draft_vocab_size"])
        return ids + self.weights["d2t"] if "d2t" in self.weights else ids


def captured_layers(
    config: Mapping[str, Any], engine: str, version: tuple[int, ...], verifier: str, layers: int
) -> tuple[int, ...]:
    """Layers whose entering state the engine hands to this drafter.

    Args:
        config: content of ``config.json``.
        verifier: class of the served model, the first of its ``architectures``.
        layers: decoder layers of it.
    """
    if engine == VLLM:
        return tuple(sorted(set(config[_IDS])))
    ids = list(config["eagle_config"][_IDS])
    as_they_are = verifier == "GptOssForCausalLM" and max(ids) == layers
    if verifier in _DEEPSEEK_RULE and version >= (0, 5, 14):
        as_they_are = ids[0] != 1
    return tuple(sorted(k if as_they_are else k + 1 for k in ids))


def problems(
    directory: Path, engine: str | None = None, version: tuple[int, ...] | None = None
) -> list[str]:
    """Why an engine would serve something else than was trained; empty: it serves it.

    Args:
        engine: null: those that the directory is made for.
        version: null: the newest known.
    """
    try:
        raw, tensors = _load(directory)
    except WrongExportError as error:
        return str(error).splitlines()
    engines = [engine] if engine else list(_made_for(raw))
    found = []
    for name in engines:
        for line in _problems(raw, tensors, name, version or NEWEST[name]):
            found.append(f"{name}: {line}")
    return found or ([] if engines else [f"config.json: found no {_IDS}, expected them"])


def read(directory: Path, engine: str, version: tuple[int, ...]) -> Loaded:
    """What ``engine`` of ``version`` serves.

    Raises:
        WrongExportError: it would serve something else than was trained, or cannot load it.
    """
    raw, tensors = _load(directory)
    found = list(_problems(raw, tensors, engine, version))
    if found:
        raise WrongExportError("\n".join(found))
    weights = {_parameter(name, engine, version): tensor for name, tensor in tensors.items()}
    return Loaded(_view(raw), weights)


def read_config(directory: Path) -> dict[str, Any]:
    """Content of ``config.json`` of a directory that :func:`read` accepts."""
    return _load(directory)[0]


def _made_for(raw: Mapping[str, Any]) -> Iterator[str]:
    if (raw.get("eagle_config") or {}).get(_IDS):
        yield SGLANG
    if raw.get(_IDS):
        yield VLLM


def _load(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    weights = sorted(p.name for p in directory.glob("*") if p.suffix in (".safetensors", ".bin"))
    if weights != ["model.safetensors"]:
        raise WrongExportError(f"found {weights or 'no weights'}, expected model.safetensors alone")
    file = directory / "model.safetensors"
    try:
        raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        with file.open("rb") as stream:
            header = stream.read(int.from_bytes(stream.read(8), "little"))
        twice = [n for n, count in Counter(_names(header)).items() if count > 1]
        tensors = {} if twice else load_file(file)
    except Exception as error:  # a damaged file may fail anywhere in either parser
        raise WrongExportError(f"{directory} cannot be read ({error}): write it again") from error
    if twice:
        raise WrongExportError(f"{file.name}: found {', '.join(twice)} twice, expected once")
    if not isinstance(raw, dict):
        raise WrongExportError("config.json: found no JSON object, expected one")
    return raw, tensors


def _names(header: bytes) -> list[str]:
    """Tensor names of a safetensors header, repeated ones too, which parsers merge."""
    pairs: list[list[tuple[str, Any]]] = []
    json.loads(header, object_pairs_hook=pairs.append)
    return [name for name, _ in pairs[-1] if name != "__metadata__"]


def _view(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The flat configuration that an engine builds its layers from."""
    if not _is_speculators(raw):
        return dict(raw)
    layer = dict(raw.get("transformer_layer_config") or {})
    classes = {"llama": "Eagle3LlamaForCausalLM", "qwen3": _QWEN3}
    flags = {flag: raw.get(flag, False) for flag in ("norm_before_fc", "fc_norm", "norm_output")}
    return {
        **layer,
        **flags,
        "norm_before_residual": raw.get("norm_before_residual", True),
        "draft_vocab_size": raw.get("draft_vocab_size"),
        "architectures": [classes.get(str(layer.get("model_type")), "unknown")],
        "tie_word_embeddings": False,
        _IDS: raw.get(_IDS),
    }


def _is_speculators(raw: Mapping[str, Any]) -> bool:
    return raw.get("speculators_config") is not None and "model_type" not in raw


def _problems(
    raw: Mapping[str, Any], tensors: Mapping[str, Tensor], engine: str, version: tuple[int, ...]
) -> Iterator[str]:
    if _is_speculators(raw) and engine == SGLANG:
        yield "config.json is in the speculators form, which SGLang does not read"
        return
    view = _view(raw)
    found = [*_config_problems(view, engine), *_flag_problems(view, engine, version)]
    found += list(_id_problems(raw, engine))
    yield from found
    if not found:  # the shapes follow from a configuration that makes sense
        yield from _tensor_problems(view, tensors, engine, version)
        yield from _map_problems(view, tensors, engine)


def _config_problems(view: Mapping[str, Any], engine: str) -> Iterator[str]:
    known = _VLLM_CLASSES if engine == VLLM else _PLAIN_CLASSES
    if (view.get("architectures") or ["none"])[0] not in known:
        yield f"architectures: found {view.get('architectures')}, expected one of {known}"
    for key in _SIZES:
        if type(view.get(key)) is not int or view[key] < 1:
            yield f"{key}: found {view.get(key)!r}, expected a whole number that is said"
    for key, only in {"num_hidden_layers": 1, "hidden_act": "silu"}.items():
        if view.get(key) != only:
            yield f"{key}: found {view.get(key)!r}, expected {only!r}"
    if "target_hidden_size" in view and view["target_hidden_size"] != view.get("hidden_size"):
        yield "target_hidden_size: expected hidden_size or no such key; null breaks both engines"
    yield from _number_problems(view)
    yield from _extra_problems(view)


def _extra_problems(view: Mapping[str, Any]) -> Iterator[str]:
    for key in ("tie_word_embeddings", "attention_bias", "mlp_bias", "bias"):
        if view.get(key, key == "tie_word_embeddings"):
            yield f"{key}: expected false, as the drafter has its own head and no bias"
    if view.get("logit_scale", 1) != 1:
        yield "logit_scale: vLLM multiplies the logits by it and SGLang does not; leave it out"


def _number_problems(view: Mapping[str, Any]) -> Iterator[str]:
    if type(view.get("rms_norm_eps")) is not float:
        yield f"rms_norm_eps: found {view.get('rms_norm_eps')!r}, expected a number"
    new, theta = view.get("rope_parameters"), view.get("rope_theta")
    if not isinstance(new, dict) or theta is None or "rope_scaling" not in view:
        yield "rope: expected rope_parameters and, for older readers, rope_theta and rope_scaling"
        return
    old = {"rope_type": "default", "rope_theta": theta, **(view["rope_scaling"] or {})}
    if old != {"rope_type": "default", **new}:
        yield f"rope: found {new} in the new place and {old} in the old one, expected the same"


def _flag_problems(view: Mapping[str, Any], engine: str, version: tuple[int, ...]) -> Iterator[str]:
    if view.get("norm_before_fc") and view.get("fc_norm"):
        yield "norm_before_fc and fc_norm: found both, expected one of them"
    if engine == VLLM:
        return
    if view.get("norm_before_residual"):
        yield "norm_before_residual: no SGLang reads it; it would take the raw state as residual"
    for flag, since in _SINCE.items():
        if view.get(flag) and version < since:
            yield f"{flag}: SGLang reads it from {'.'.join(map(str, since))} on"


def _id_problems(raw: Mapping[str, Any], engine: str) -> Iterator[str]:
    nested = raw.get("eagle_config") or {}
    ids = raw.get(_IDS) if engine == VLLM else nested.get(_IDS)
    where = _IDS if engine == VLLM else f"eagle_config.{_IDS}"
    if nested.get("use_aux_hidden_state") is False:
        yield "eagle_config.use_aux_hidden_state: found false, expected true, or no layer is read"
    if not isinstance(ids, list) or not all(type(k) is int for k in ids) or not ids:
        yield f"{where}: found {ids!r}, expected layer ids; without them the engine guesses"
        return
    if ids != sorted(set(ids)):
        yield f"{where}: found {ids}, expected ascending ids, the order of the states in fc"
    if raw.get("num_aux_hidden_states", len(ids)) != len(ids):
        yield f"num_aux_hidden_states: found {raw['num_aux_hidden_states']} with {len(ids)} ids"


def _parameter(name: str, engine: str, version: tuple[int, ...]) -> str:
    """The engine's parameter that a tensor goes to; an unknown name for one that it drops."""
    if engine == SGLANG:
        if version < (0, 5, 12) and name.startswith("layers.0."):
            return f"dropped {name}"
        name = name if name.startswith("model.lm_head") else name.removeprefix("model.")
    if name.startswith("midlayer."):
        return f"layers.0.{name.removeprefix('midlayer.')}"
    return name


def _shapes(view: Mapping[str, Any], ids: int) -> dict[str, tuple[int, ...]]:
    h, i, size = view["hidden_size"], view["intermediate_size"], view["head_dim"]
    q, kv = view["num_attention_heads"] * size, view["num_key_value_heads"] * size
    layer = {
        "input_layernorm": (h,),
        "hidden_norm": (h,),
        "post_attention_layernorm": (h,),
        "self_attn.q_proj": (q, 2 * h),
        "self_attn.k_proj": (kv, 2 * h),
        "self_attn.v_proj": (kv, 2 * h),
        "self_attn.o_proj": (h, q),
        "mlp.gate_proj": (i, h),
        "mlp.up_proj": (i, h),
        "mlp.down_proj": (h, i),
    }
    if view["architectures"][0] == _QWEN3:
        layer |= {"self_attn.q_norm": (size,), "self_attn.k_norm": (size,)}
    top = {"fc": (h, ids * h), "norm": (h,), "lm_head": (view["draft_vocab_size"], h)}
    if view.get("norm_before_fc"):
        top["input_norm"] = (ids * h,)
    if view.get("fc_norm"):
        top |= {f"fc_norm.{k}": (h,) for k in range(ids)}
    names = {**top, **{f"layers.0.{name}": shape for name, shape in layer.items()}}
    return {f"{name}.weight": shape for name, shape in names.items()}


def _tensor_problems(
    view: Mapping[str, Any], tensors: Mapping[str, Tensor], engine: str, version: tuple[int, ...]
) -> Iterator[str]:
    nested = (view.get("eagle_config") or {}).get(_IDS)
    shapes = _shapes(view, len((view.get(_IDS) if engine == VLLM else nested) or ()))
    optional = {"embed_tokens.weight": (view["vocab_size"], view["hidden_size"])}
    taken: dict[str, str] = {}
    for name, tensor in tensors.items():
        if name in ("d2t", "t2d"):
            continue
        parameter = _parameter(name, engine, version)
        expected = {**shapes, **optional}.get(parameter)
        if expected is None:
            does = "drops it without a word" if engine == SGLANG else "stops at it"
            yield f"{name}: no parameter is called so, the engine {does}"
        elif parameter in taken:
            yield f"{name}: found {taken[parameter]} too, which is the same parameter"
        elif tuple(tensor.shape) != expected:
            yield f"{name}: found shape {list(tensor.shape)}, expected {list(expected)}"
        elif tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            yield f"{name}: found {tensor.dtype}, expected bfloat16, float16 or float32"
        elif not bool(tensor.isfinite().all()):
            yield f"{name}: found NaN or inf, expected trained weights"
        taken[parameter] = name
    for parameter in shapes.keys() - taken.keys():
        yield f"{parameter} is missing: the engine would serve whatever was in memory"


def _map_problems(
    view: Mapping[str, Any], tensors: Mapping[str, Tensor], engine: str
) -> Iterator[str]:
    draft, verifier, d2t = view["draft_vocab_size"], view["vocab_size"], tensors.get("d2t")
    if d2t is None:
        if draft != verifier:
            yield f"d2t is missing: {draft} draft ids would be taken for verifier ids"
        return
    if draft == verifier:
        yield "d2t: found one beside a full vocabulary, expected none; vLLM stops at it"
        return
    if d2t.dtype != torch.int64 or tuple(d2t.shape) != (draft,):
        yield f"d2t: found {d2t.dtype} {list(d2t.shape)}, expected int64 [{draft}]"
        return
    ids = d2t + torch.arange(draft)
    if int(ids.min()) < 0 or int(ids.max()) >= verifier or len(ids.unique()) != draft:
        yield "d2t: draft id + d2t leaves the vocabulary or repeats; expected offsets, not ids"
        return
    t2d = tensors.get("t2d")
    if t2d is not None:
        mask = torch.zeros(verifier, dtype=torch.bool)
        mask[ids] = True
        if t2d.dtype != torch.bool or not torch.equal(t2d, mask):
            yield "t2d: does not select the tokens that d2t names"


def main(arguments: list[str]) -> int:
    """Print what is wrong with a directory; returns the exit code."""
    engine = arguments[1] if len(arguments) > 1 else None
    version = tuple(map(int, arguments[2].split("."))) if len(arguments) > 2 else None
    found = problems(Path(arguments[0]), engine, version)
    print(*(found or ["nothing wrong found"]), sep="\n")
    return 2 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
