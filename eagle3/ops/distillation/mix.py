"""Names of the losses, and what a mix of them may be."""

from __future__ import annotations

import difflib
import math

from eagle3.errors import ConfigError
from eagle3.ops.distillation import reference
from eagle3.ops.distillation.rows import Mix

LOSSES: tuple[str, ...] = tuple(reference.DIVERGENCES)


def check_mix(mix: Mix) -> None:
    """Refuse unknown names, negative or non-finite weights, and a mix that weighs nothing.

    Raises:
        ConfigError: names the entry of ``loss.mix``, and the nearest loss of an unknown name.
    """
    for index, (name, weight) in enumerate(mix):
        if name not in LOSSES:
            near = difflib.get_close_matches(name, LOSSES, n=1, cutoff=0)[0]
            raise ConfigError(
                f"loss.mix[{index}].name: unknown loss {name!r}; did you mean {near!r}? "
                f"Losses: {', '.join(LOSSES)}"
            )
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(
                f"loss.mix[{index}].weight: found {weight} for {name!r}, "
                "expected a finite number that is not negative"
            )
    if not any(weight > 0 for _, weight in mix):
        raise ConfigError(
            "loss.mix: found no term with a weight above 0, expected at least one, "
            "such as [{name: kl, weight: 1.0}]"
        )
