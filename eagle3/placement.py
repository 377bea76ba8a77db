"""Where a rank trains, in Lightning's terms.

Apart from :mod:`eagle3.distributed`, so that a process which only starts ranks, or finds a mistake,
need not wait for Lightning.
"""

from __future__ import annotations

import warnings
from typing import Any

from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy

from eagle3.checks import device_count
from eagle3.config import Config
from eagle3.distributed import Ranks, ranks_from_environment, resolve_accelerator
from eagle3.names import StrategyName
from eagle3.sharding import ShardedStrategy

_BUCKET_MB = 256
"""MiB of gradients that ranks exchange at once."""


def placement(config: Config) -> dict[str, Any]:
    """Arguments of ``lightning.Trainer`` that say where this process trains."""
    accelerator = resolve_accelerator(config.trainer)
    ranks = ranks_from_environment() or Ranks()
    devices = config.trainer.devices
    return {
        "accelerator": accelerator,
        "devices": devices if accelerator == "gpu" else device_count(devices),
        "num_nodes": ranks.num_nodes,
        "strategy": _strategy(config, ranks) if ranks.world_size > 1 else "auto",
        "use_distributed_sampler": False,  # the plan of the data module knows its rank
    }


def _strategy(config: Config, ranks: Ranks) -> ParallelStrategy:
    if config.trainer.strategy is StrategyName.fsdp2:
        return ShardedStrategy(ranks.world_size)
    return _replicated()


def _replicated() -> DDPStrategy:
    """Gradients are views of the buckets, which saves a copy of all of them.

    A layer that is unrolled S times has its gradients only at the end of the backward pass, so
    small buckets would overlap nothing and cost more messages.
    """
    # the option that follows it, in torch 2.13, would send every rank the embeddings it has read
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    return DDPStrategy(
        gradient_as_bucket_view=True, broadcast_buffers=False, bucket_cap_mb=_BUCKET_MB
    )


def cluster_environment() -> ClusterEnvironment:
    """For Lightning: ranks are told by :func:`ranks_from_environment`, also under Slurm.

    Lightning itself would take a job's ``SLURM_*`` variables for those of a rank.
    """
    if ranks_from_environment() is None:
        return LightningEnvironment()
    return TorchElasticEnvironment()  # torchrun's variables, whoever sets them
