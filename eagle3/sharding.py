"""``trainer.strategy=fsdp2``: each rank keeps its part of weights, gradients and optimizer states.

Sharded with ``fully_shard`` of torch under Lightning's ModelParallelStrategy. Whole weights are
there only while a part of the step needs them::

    gathered:  drafter.within   norms, all the time
               layer.within     fc ─► unroll                    backward of the unroll, fc
               lm_head.within                 loss ─► loss backward

Gradients are averaged over ranks as with DDP, so the loss needs no other factor; with several packs
in a step each is reduced at once, or a rank would hold whole gradients. A checkpoint holds whole
tensors and the same entries as one of DDP or of a single rank, so any of them can go on from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from eagle3.model.drafter import Drafter

_SCOPE = "within"


def shard(drafter: Drafter, mesh: DeviceMesh) -> None:
    """Leave this rank its part of each weight; does nothing to a drafter that is sharded.

    Every rank comes with the same weights, which nothing is sent to make sure of: ranks load or
    draw them alike. Buffers stay whole.

    Args:
        mesh: all ranks, one dimension.
    """
    if isinstance(drafter, FSDPModule):
        return
    fully_shard(drafter.fc, mesh=mesh)
    fully_shard(drafter.layer, mesh=mesh)
    # the backward begins with the head, so giving its weight away in between would be in vain
    fully_shard(drafter.lm_head, mesh=mesh, reshard_after_forward=False)
    fully_shard(drafter, mesh=mesh, reshard_after_forward=False)
    for part in (drafter, drafter.layer, drafter.lm_head):
        register_fsdp_forward_method(part, _SCOPE)


def whole(tensor: Tensor) -> Tensor:
    """The tensor that the ranks hold in parts (all of them have to ask), or the one given."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's, over all ranks, with the checkpoints of every other strategy.

    Lightning's own names optimizer states in another order than the optimizer does, and loads them
    before the module has seen the checkpoint, so both ways go through the usual hooks here.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__(
            data_parallel_size=world_size, tensor_parallel_size=1, save_distributed_checkpoint=False
        )

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def block_backward_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Reduce the gradients of every pack at once."""
        return nullcontext()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Whole states on rank 0, nothing on the others; all ranks have to ask."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        gathered = _gathered(optimizer.state_dict(), keep=self.is_global_zero)
        assert isinstance(gathered, dict)
        return gathered

    def load_checkpoint(
        self, checkpoint_path: str | PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read on every rank; what takes its part is :meth:`load_model_state_dict` and others."""
        path = Path(checkpoint_path)
        return self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        present = self.lightning_module.state_dict()
        own = {
            name: _part_like(present[name], value) if name in present else value
            for name, value in checkpoint["state_dict"].items()
        }
        self.lightning_module.load_state_dict(own, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            weights = [p for group in optimizer.param_groups for p in group["params"]]
            states = {
                number: {name: _part_like(weights[number], value) for name, value in state.items()}
                for number, state in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": states})


def _gathered(value: Any, *, keep: bool) -> Any:
    """Plain values with whole tensors in the memory of the host, one gathered after the other."""
    if isinstance(value, dict):
        return {key: _gathered(each, keep=keep) for key, each in value.items()}
    if isinstance(value, list):
        return [_gathered(each, keep=keep) for each in value]
    if not isinstance(value, Tensor):
        return value
    full = whole(value)
    return full.cpu() if keep else None


def _part_like(weight: Tensor, value: Any) -> Any:
    """This rank's part of ``value`` where it has the shape of a weight that is sharded."""
    if not isinstance(weight, DTensor) or not isinstance(value, Tensor):
        return value
    if value.shape != weight.shape:  # a count of steps; a weight of another size is refused later
        return value
    placements: tuple[Placement, ...] = weight.placements
    mesh = weight.device_mesh
    # every rank has read the file, so nothing is sent
    return distribute_tensor(value.to(mesh.device_type), mesh, placements, src_data_rank=None)
