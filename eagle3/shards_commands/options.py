"""What the options of all sub-commands have in common: numbers with a limit, names in messages."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

_OPTIONS = {
    "paths.shards": "DIR",
    "paths.arrow": "--arrow",
    "paths.cache": "--cache",
    "paths.verifier": "--verifier",
    "paths.vocab_map": "--vocab-map",
    "paths.source_labels": "--source-labels",
    "data.aux_layer_ids": "--aux-layer-ids",
    "data.layer_id_convention": "--layer-id-convention",
    "data.last_hidden": "--last-hidden",
    "data.num_workers": "--num-workers",
    "data.max_samples": "--max-samples",
    "data.max_bad_samples": "--max-bad-samples",
    "model.num_aux_layers": "--num-aux-layers",
    "model.hidden_size": "--hidden-size",
    "model.vocab_size": "--vocab-size",
    "model.draft_vocab_size": "SIZE",
}
_KEY = re.compile(rf"\b({'|'.join(map(re.escape, _OPTIONS))})\b(=\[[\d,]*\])?")
_CONFIG = re.compile(r"\bthe config\b(?![.'])")


def as_options(message: str, vocab_map: str = "--vocab-map") -> str:
    """A message of the package, with options where it names keys of a training's configuration.

    ``data.aux_layer_ids=[2,30]`` becomes ``--aux-layer-ids=2,30``; ``vocab_map`` is the option of
    the command for a vocabulary map.
    """
    options = _OPTIONS | {"paths.vocab_map": vocab_map}
    named = _KEY.sub(lambda found: options[found[1]] + _plain_list(found[2]), message)
    return _CONFIG.sub("the command line", named)


def whole(least: int) -> Callable[[str], int]:
    """A parser of whole numbers that are not smaller than ``least``."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or number < least:
            raise argparse.ArgumentTypeError(
                f"found {text!r}, expected a whole number of at least {least}"
            )
        return number

    return parse


def _plain_list(value: str | None) -> str:
    return "" if value is None else value.replace("[", "").replace("]", "")
