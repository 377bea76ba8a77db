"""An untrained drafter, to try the way to the server before the long run."""

from __future__ import annotations

from pathlib import Path

import torch

from eagle3.data.declaration import convert_layer_ids
from eagle3.data.vocab import VocabMap
from eagle3.data.vocab_files import load_vocab_map
from eagle3.errors import ConfigError
from eagle3.model.build import check_sizes
from eagle3.model.drafter import Drafter
from eagle3.model.weights import load_verifier_weights, read_verifier_config
from eagle3.names import CaptureSource, LayerIdConvention, LmHeadInit
from eagle3.serving.config import ExportConfig
from eagle3.serving.recorded import recorded_verifier
from eagle3.serving.source import ExportSource, verifier_directory


def untrained_source(settings: ExportConfig) -> ExportSource:
    """A drafter of ``model.*`` with random weights, its head the verifier's where that is at hand.

    Raises:
        ConfigError: ``paths.verifier`` or the layers are missing, or sizes are not the verifier's.
    """
    directory = verifier_directory(settings, settings)
    if directory is None:
        raise ConfigError(
            "dry_run=true: found no verifier, expected paths.verifier=DIR; its config.json is "
            "enough"
        )
    check_sizes(settings.model, read_verifier_config(directory))
    identity = recorded_verifier(directory)
    if identity.architecture is None:
        raise ConfigError(
            f"{directory}/config.json: found no architectures, expected the verifier's class, "
            "since it decides how engines count layers: add it"
        )
    model = settings.model
    if settings.paths.vocab_map is not None:
        given = Path(settings.paths.vocab_map)
        vocab = load_vocab_map(given, model.draft_vocab_size, model.vocab_size)
    else:
        selected = torch.arange(model.draft_vocab_size)
        vocab = VocabMap.from_selected(selected, model.vocab_size)
    drafter = Drafter(model)
    drafter.init_weights(torch.Generator().manual_seed(settings.seed))
    if model.lm_head_init is LmHeadInit.verifier and any(directory.glob("*.safetensors")):
        head = load_verifier_weights(directory, torch.bfloat16).head[vocab.selected]
        with torch.no_grad():
            drafter.lm_head.weight.copy_(head)
    return ExportSource(
        label=f"an untrained drafter ({settings.name})",
        config=settings,
        norms=drafter.norms,
        tensors={name: p.detach() for name, p in drafter.named_parameters()},
        vocab=vocab,
        aux_layer_ids=_entering(settings),
        verifier=identity,
        verifier_directory=directory,
    )


def _entering(settings: ExportConfig) -> tuple[int, ...]:
    ids, convention = settings.data.aux_layer_ids, settings.data.layer_id_convention
    if ids is None and settings.capture.source is not CaptureSource.off:
        return tuple(settings.capture.aux_layer_ids)
    if ids is None or convention is None:
        raise ConfigError(
            f"dry_run=true: found data.aux_layer_ids={ids} and data.layer_id_convention="
            f"{convention}, expected both, as the shards will declare them, such as "
            "data.aux_layer_ids=[2,30,58] data.layer_id_convention=entering"
        )
    return convert_layer_ids(ids, convention, LayerIdConvention.entering)
