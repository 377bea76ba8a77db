"""What cannot be had together with weights that are shared out over ranks."""

from __future__ import annotations

from collections.abc import Iterator

from eagle3.config import Config
from eagle3.names import Compile, OptimizerName, StrategyName


def needs_whole_weights(config: Config) -> Iterator[str]:
    """One problem a setting: Muon makes whole matrices orthogonal, compiled graphs hold whole
    weights, and the pull to the start keeps a copy of them from before they are shared out."""
    if config.trainer.strategy is not StrategyName.fsdp2:
        return
    optim, compiled = config.optim, config.compute.compile
    for asked, setting, instead in (
        (
            optim.optimizer is not OptimizerName.adamw,
            f"optim.optimizer={optim.optimizer}",
            "optim=adamw",
        ),
        (compiled is not Compile.none, f"compute.compile={compiled}", "compute.compile=none"),
        (
            optim.pull_to_start > 0,
            f"optim.pull_to_start={optim.pull_to_start}",
            "optim.pull_to_start=0",
        ),
    ):
        if asked:
            yield (
                f"{setting} needs whole weights, and trainer.strategy=fsdp2 leaves a rank only its "
                f"part of them: give {instead}, or trainer.strategy=ddp"
            )
