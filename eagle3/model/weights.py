"""Find the verifier's frozen tensors by name and read only those.

Names differ by family: plain causal models, the text part of multimodal ones (Kimi-K2.5 keeps its
language model under ``language_model.``), and tied embeddings, where no head is stored at all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle3.errors import VerifierError

_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "language_model.")
EMBED_NAMES = tuple(f"{prefix}embed_tokens.weight" for prefix in _PREFIXES)
NORM_NAMES = tuple(f"{prefix}norm.weight" for prefix in _PREFIXES)
HEAD_NAMES = (
    "lm_head.weight",
    "language_model.lm_head.weight",
    "model.lm_head.weight",
    "model.language_model.lm_head.weight",
)
_UNIT_OFFSET_FAMILIES = ("gemma", "qwen3_5", "qwen3_next")


@dataclass(frozen=True)
class VerifierConfig:
    """What training needs from the verifier's ``config.json``."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    rms_norm_eps: float
    tied_embeddings: bool
    norm_adds_one: bool
    """The family stores RMSNorm gains minus one."""


@dataclass(frozen=True)
class VerifierWeights:
    """The frozen tensors, their names in the checkpoint, and the norm's eps."""

    embed_tokens: Tensor
    """[W, H]"""
    norm: Tensor
    """[H]"""
    head: Tensor
    """[W, H]; the embedding itself when tied."""
    names: dict[str, str]
    config: VerifierConfig


@dataclass(frozen=True)
class HeadWeights:
    """What turns a last state into logits."""

    norm: Tensor
    """[H], float32."""
    head: Tensor
    """[W, H]"""
    config: VerifierConfig


def read_verifier_config(directory: Path) -> VerifierConfig:
    """Read ``config.json``; the text part of a multimodal config counts."""
    path = directory / "config.json"
    if not path.is_file():
        raise VerifierError(
            f"{directory} holds no config.json: give paths.verifier=/directory/of/the/verifier "
            "(config.json and *.safetensors)"
        )
    outer = _read_object(path)
    config = outer.get("text_config") or outer
    if not isinstance(config, dict):
        raise VerifierError(f"{path}: text_config is no JSON object; copy the file again")

    def need(*keys: str) -> Any:
        for key in keys:
            if config.get(key) is not None:
                return config[key]
        raise VerifierError(f"{path}: none of {', '.join(keys)} found; expected a causal model")

    family = str(config.get("model_type", ""))
    tied = config.get("tie_word_embeddings", outer.get("tie_word_embeddings", False))

    def number(*keys: str) -> int | float:
        value = need(*keys)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise VerifierError(f"{path}: {keys[0]} is {value!r}, expected a number")
        return value

    return VerifierConfig(
        hidden_size=int(number("hidden_size")),
        vocab_size=int(number("vocab_size")),
        num_layers=int(number("num_hidden_layers")),
        rms_norm_eps=float(number("rms_norm_eps", "layer_norm_eps")),
        tied_embeddings=bool(tied),
        norm_adds_one=family.startswith(_UNIT_OFFSET_FAMILIES),
    )


def load_head_weights(directory: Path, dtype: torch.dtype) -> HeadWeights:
    """Read final norm (float32) and head, but no embedding unless it is the head.

    Raises:
        VerifierError: as :func:`load_verifier_weights`.
    """
    config = read_verifier_config(directory)
    files = _tensor_files(directory)
    head = _head_name(files, config, _resolve(files, EMBED_NAMES, directory), directory)
    shape = (config.vocab_size, config.hidden_size)
    norm = _read(files, _resolve(files, NORM_NAMES, directory), shape[1:]).float()
    return HeadWeights(
        norm=norm + 1.0 if config.norm_adds_one else norm,
        head=_read(files, head, shape).to(dtype),
        config=config,
    )


def load_verifier_weights(directory: Path, dtype: torch.dtype) -> VerifierWeights:
    """Read embedding, final norm (float32) and head, and nothing else, from ``directory``.

    Raises :class:`VerifierError` when a tensor is missing (with the names tried and the nearest
    ones present) or has another shape than the config says.
    """
    config = read_verifier_config(directory)
    files = _tensor_files(directory)
    names = {
        "embed_tokens": _resolve(files, EMBED_NAMES, directory),
        "norm": _resolve(files, NORM_NAMES, directory),
    }
    names["head"] = _head_name(files, config, names["embed_tokens"], directory)
    shape = (config.vocab_size, config.hidden_size)
    embed = _read(files, names["embed_tokens"], shape).to(dtype)
    tied = names["head"] == names["embed_tokens"]
    norm = _read(files, names["norm"], shape[1:]).float()
    return VerifierWeights(
        embed_tokens=embed,
        norm=norm + 1.0 if config.norm_adds_one else norm,
        head=embed if tied else _read(files, names["head"], shape).to(dtype),
        names=names,
        config=config,
    )


def _head_name(
    files: dict[str, Path], config: VerifierConfig, embed_name: str, directory: Path
) -> str:
    stored = [name for name in HEAD_NAMES if name in files]
    if stored:
        return stored[0]
    if config.tied_embeddings:
        return embed_name
    raise _missing(HEAD_NAMES, files, directory, " and tie_word_embeddings is false")


def _tensor_files(directory: Path) -> dict[str, Path]:
    """Tensor name -> file, from the index when there is one, else from the files' headers."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _read_object(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise VerifierError(f"{index}: no weight_map found; copy the verifier's index again")
        return {name: directory / str(file) for name, file in weight_map.items()}
    files: dict[str, Path] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with _open(path) as handle:
            files.update(dict.fromkeys(handle.keys(), path))
    if not files:
        raise VerifierError(
            f"{directory} holds no *.safetensors: found {_listing(directory)}; expected the "
            "verifier's weights in safetensors form"
        )
    return files


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise VerifierError(
            f"{path} is no JSON ({error}): copy the verifier's file again"
        ) from error
    if not isinstance(content, dict):
        raise VerifierError(f"{path} holds no JSON object: copy the verifier's file again")
    return content


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise VerifierError(
            f"{path} cannot be read as safetensors ({error}): copy the verifier's file again"
        ) from error


def _read(files: dict[str, Path], name: str, shape: tuple[int, ...]) -> Tensor:
    with _open(files[name]) as handle:
        if name not in handle.keys():  # noqa: SIM118  (a safetensors handle is no mapping)
            raise VerifierError(
                f"{files[name]}: {name} is not in it, though the index says so; the directory "
                "mixes two downloads: copy the verifier again"
            )
        tensor: Tensor = handle.get_tensor(name)
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise VerifierError(
            f"{files[name]}: {name} is stored as {tensor.dtype}: quantised weights are not read "
            "without their scales; give a directory with this tensor in bfloat16, float16 or "
            "float32"
        )
    if not bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all()):
        raise VerifierError(f"{files[name]}: {name} holds NaN or inf; copy the file again")
    if tuple(tensor.shape) != shape:
        raise VerifierError(
            f"{files[name]}: {name} is {tuple(tensor.shape)}, config.json says {shape}; "
            "the directory mixes two models"
        )
    return tensor


def _resolve(files: dict[str, Path], candidates: tuple[str, ...], directory: Path) -> str:
    for name in candidates:
        if name in files:
            return name
    raise _missing(candidates, files, directory)


def _missing(
    candidates: tuple[str, ...], files: dict[str, Path], directory: Path, why: str = ""
) -> VerifierError:
    leaf = candidates[0].split(".")[-2]
    near = [name for name in files if leaf in name] or sorted(files)[:5]
    return VerifierError(
        f"{directory}: none of {', '.join(candidates)} found{why}. Present and alike: "
        f"{', '.join(near[:5])}. Rename the tensor or point paths.verifier elsewhere"
    )


def _listing(directory: Path) -> str:
    if not directory.is_dir():
        return "no such directory"
    names = sorted(path.name for path in directory.iterdir())
    return ", ".join(names[:5]) or "an empty directory"
