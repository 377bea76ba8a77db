"""From the configuration of an experiment to that of its rehearsal."""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

from eagle3.checks import device_count
from eagle3.config import CaptureConfig, Config, ModelConfig
from eagle3.names import Accelerator, Arrival

SUFFIX = "_rehearsal"
_WIDTH_MULTIPLE = 8
_SMALLEST_WIDTH = 32
_SMALLEST_VOCABULARY = 256
_SMALLEST_DRAFT = 64
_VAL_RATIO = 0.05
"""Share of prompts held out where the experiment names a validation directory instead."""


def reduced(config: Config) -> Config:
    """The rehearsal of ``config``: narrow, on CPU, without paths to read from.

    What shapes the run stays: ranks, packing, schedule, precision, ways of computing, optimizer,
    validation and resume. A rank a card becomes a process.
    """
    rehearsal, trainer = config.rehearsal, config.trainer
    return replace(
        config,
        name=config.name + SUFFIX,
        epochs=min(config.epochs, rehearsal.epochs),
        card=None,
        capture=CaptureConfig(),
        model=narrowed(config.model, rehearsal.width_divisor),
        optim=replace(config.optim, pull_to_start=0.0),  # it needs the start that is left out
        paths=replace(config.paths, val_shards=None, init=None, arrow=None, source_labels=None),
        data=replace(
            config.data,
            mixture=[],
            arrival=Arrival.complete,
            aux_layer_ids=None,
            layer_id_convention=None,
            last_hidden=None,
            max_samples=None,
            val_ratio=config.data.val_ratio or _VAL_RATIO,
        ),
        trainer=replace(
            trainer,
            accelerator=Accelerator.cpu,
            devices=device_count(trainer.devices),
            checkpoint_every_steps=trainer.checkpoint_every_steps
            or rehearsal.checkpoint_every_steps,
        ),
    )


def narrowed(model: ModelConfig, divisor: int) -> ModelConfig:
    """The same kind of drafter at one part in ``divisor`` of every width.

    Heads and their size share the divisor. No width goes below what still tells tokens apart, and
    query heads per key head, number of aux layers, rope and norms stay.
    """
    shared = isqrt(divisor)
    key_heads = max(model.num_key_value_heads // shared, 1)
    vocabulary = max(model.vocab_size // divisor, _SMALLEST_VOCABULARY)
    draft = max(model.draft_vocab_size // divisor, _SMALLEST_DRAFT)
    return replace(
        model,
        hidden_size=_width(model.hidden_size, divisor),
        intermediate_size=_width(model.intermediate_size, divisor),
        vocab_size=vocabulary,
        draft_vocab_size=vocabulary if model.draft_vocab_size == model.vocab_size else draft,
        num_key_value_heads=key_heads,
        num_attention_heads=key_heads * (model.num_attention_heads // model.num_key_value_heads),
        head_dim=max(model.head_dim // shared // 2 * 2, _WIDTH_MULTIPLE),
    )


def _width(size: int, divisor: int) -> int:
    return max(size // divisor // _WIDTH_MULTIPLE * _WIDTH_MULTIPLE, _SMALLEST_WIDTH)
