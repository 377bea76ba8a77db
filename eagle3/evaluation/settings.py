"""Which training configuration an evaluation runs under: that of the checkpoint, with overrides."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from eagle3.checkpoint import load_checkpoint
from eagle3.compose import to_config
from eagle3.config import Config
from eagle3.errors import ConfigError
from eagle3.evaluation.config import EvaluateConfig
from eagle3.names import Precision

GROUPS = ("paths", "data", "model", "trainer", "val")
"""Groups that an evaluation shares with training."""


def evaluation_config(settings: EvaluateConfig, overridden: Sequence[str]) -> Config:
    """The configuration whose validation is repeated.

    Args:
        settings: as composed.
        overridden: dotted keys that the command line sets; of the groups of training only these
            replace what the checkpoint's run had. Without ``ckpt`` all of ``settings`` count.

    Raises:
        ConfigError: neither ``ckpt`` nor ``head`` is given, or both.
        DataError: ``ckpt`` is no checkpoint of this package.
    """
    if (settings.ckpt is None) == (settings.head is None):
        raise ConfigError(
            f"found ckpt={settings.ckpt} and head={settings.head}, expected one of them: "
            "ckpt=RUN/checkpoints/best.ckpt for a drafter of this package, head=DIR for an export "
            "or a head of another maker"
        )
    own = {name: dataclasses.asdict(getattr(settings, name)) for name in GROUPS}
    if settings.ckpt is None:
        base: dict[str, Any] = {}
        changes = [f"{group}.{key}" for group, values in own.items() for key in values]
    else:
        base = load_checkpoint(Path(settings.ckpt))["eagle3"]["config"]
        changes = [key for key in overridden if key.split(".")[0] in GROUPS]
    for key in changes:
        _set(base, key.split("."), _get(own, key.split(".")))
    base.setdefault("paths", {})["init"] = settings.ckpt or settings.head
    base["resume"] = None
    # one process judges on one device, whatever the training had
    base.setdefault("trainer", {})["devices"] = 1
    if "trainer.accelerator" not in changes:
        base["trainer"]["accelerator"] = own["trainer"]["accelerator"]
    if "trainer.precision" not in changes and not torch.cuda.is_available():
        base["trainer"]["precision"] = Precision.auto.value
    return to_config(OmegaConf.create(base))


def _get(tree: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        tree = tree[key]
    return tree


def _set(tree: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
    tree[keys[-1]] = value
