"""What is exported: a trained drafter with everything its checkpoint says, or an untrained one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch import Tensor

from eagle3.checkpoint import load_checkpoint
from eagle3.compose import to_config
from eagle3.config import Config
from eagle3.data.vocab import VocabMap
from eagle3.data.vocab_files import check_consistency
from eagle3.errors import ConfigError, DataError
from eagle3.model.build import check_sizes
from eagle3.model.layers import NormLayout
from eagle3.model.weights import read_verifier_config
from eagle3.serving.config import ExportConfig
from eagle3.serving.layout import OFFSETS, SELECTED, check_weights
from eagle3.serving.recorded import VerifierIdentity, recorded_verifier

_WEIGHTS = "drafter."


@dataclass(frozen=True, eq=False)
class ExportSource:
    """A drafter by our names, and where it comes from."""

    label: str
    config: Config
    norms: NormLayout
    tensors: dict[str, Tensor]
    """Parameters only."""
    vocab: VocabMap
    aux_layer_ids: tuple[int, ...]
    """*entering* convention."""
    verifier: VerifierIdentity
    verifier_directory: Path | None
    """Null: it is not at hand."""
    step: int | None = None
    """Optimizer steps; null: untrained."""
    recorded: Mapping[str, Any] = field(default_factory=dict)
    """What else the checkpoint says."""


def read_checkpoint(settings: ExportConfig, overridden: tuple[str, ...]) -> ExportSource:
    """Read ``settings.ckpt``; the verifier may lie elsewhere now (``paths.verifier``).

    Args:
        overridden: dotted keys of the command line.

    Raises:
        ConfigError: an override that would change what was trained; the verifier is not known.
        DataError: no checkpoint of this package, or a damaged one.
    """
    assert settings.ckpt is not None
    _refuse_overrides(settings.ckpt, overridden)
    path = Path(settings.ckpt)
    content = load_checkpoint(path)
    said = content["eagle3"]
    config = to_config(OmegaConf.create(said["config"]))
    norms = NormLayout.preset(config.model.norm_layout)
    tensors = _drafter_tensors(content["state_dict"], path)
    check_weights(str(path), tensors, config.model, norms)
    vocab = VocabMap(tensors.pop(OFFSETS).long(), tensors.pop(SELECTED).bool())
    check_consistency(vocab, path)
    directory = verifier_directory(settings, config)
    identity = _identity(path, said.get("verifier"), directory)
    if directory is not None:
        check_sizes(config.model, read_verifier_config(directory))
    return ExportSource(
        label=str(path),
        config=config,
        norms=norms,
        tensors=tensors,
        vocab=vocab,
        aux_layer_ids=tuple(said.get("aux_layer_ids") or ()),
        verifier=identity,
        verifier_directory=directory,
        step=int(content.get("global_step", 0)),
        recorded={key: value for key, value in said.items() if key not in ("config", "verifier")},
    )


def verifier_directory(settings: Config, config: Config) -> Path | None:
    """The verifier's directory as given now, else as the run had it, if it is there."""
    for given in (settings.paths.verifier, config.paths.verifier):
        if given is not None and (Path(given) / "config.json").is_file():
            return Path(given)
    if settings.paths.verifier is not None:
        raise ConfigError(
            f"paths.verifier={settings.paths.verifier}: found no config.json there, expected the "
            "verifier's directory"
        )
    demo = Path(config.paths.cache) / "smollm2" / "verifier"
    captured = config.paths.verifier is None and (demo / "config.json").is_file()
    return demo if captured else None


def _refuse_overrides(ckpt: str, overridden: tuple[str, ...]) -> None:
    own = set(ExportConfig.__dataclass_fields__) - set(Config.__dataclass_fields__)
    foreign = [k for k in overridden if k.split(".")[0] not in own and k != "paths.verifier"]
    if foreign:
        raise ConfigError(
            f"found {', '.join(foreign)} beside ckpt={ckpt}, expected only keys of the export: "
            "what was trained is in the checkpoint. Leave them out; a verifier that moved is "
            "paths.verifier=DIR"
        )


def _drafter_tensors(state: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    foreign = sorted(name for name in state if not name.startswith(_WEIGHTS))
    if foreign:
        raise DataError(
            f"{path}: found {', '.join(foreign[:5])}, expected only {_WEIGHTS}*: under other names "
            "an engine would drop the weights without a word"
        )
    return {name.removeprefix(_WEIGHTS): tensor for name, tensor in state.items()}


def _identity(
    path: Path, recorded: Mapping[str, Any] | None, directory: Path | None
) -> VerifierIdentity:
    """As recorded by the run; the directory is read where the checkpoint is from before that."""
    found = None if directory is None else recorded_verifier(directory)
    known = None if recorded is None else VerifierIdentity(**recorded)
    if known is not None and found is not None:
        same = (known.architecture, known.num_layers) == (found.architecture, found.num_layers)
        if not same and known.architecture is not None:
            raise ConfigError(
                f"{directory}: found {found.architecture} with {found.num_layers} layers, expected "
                f"{known.architecture} with {known.num_layers}, for which {path} was trained: give "
                "its directory as paths.verifier"
            )
    # an architecture that was added to config.json after the run counts
    chosen = known if known is not None and known.architecture is not None else found or known
    if chosen is None or chosen.architecture is None:
        raise ConfigError(
            f"{path}: found no class of the verifier, expected one, since it decides how engines "
            "count layers: give paths.verifier=DIR with architectures in its config.json"
        )
    return chosen
