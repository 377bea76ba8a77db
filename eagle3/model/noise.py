"""Noise on aux states, seeded by the pack so that ranks, threads and resume cannot change it."""

from __future__ import annotations

import torch

from eagle3.data.batch import PackedBatch
from eagle3.dims import AuxHidden
from eagle3.names import Noise

_MIX = 1_000_003


def noisy(
    batch: PackedBatch, kind: Noise, std: float, *, seed: int, dtype: torch.dtype
) -> AuxHidden:
    """Aux states [T, K*H] in ``dtype``, plus noise of standard deviation ``std``, on the device.

    ``uniform`` noise spans ``±sqrt(3) * std``, so both kinds have the same size.
    """
    aux = batch.aux_hidden.to(dtype)
    if std == 0.0 or len(batch) == 0:
        return aux
    key = ((seed * _MIX + batch.epoch) * _MIX + batch.index) % 2**63
    generator = torch.Generator(device=aux.device).manual_seed(key)
    if kind is Noise.gaussian:
        noise = torch.randn(aux.shape, generator=generator, device=aux.device, dtype=dtype)
        return noise.mul_(std).add_(aux)
    noise = torch.rand(aux.shape, generator=generator, device=aux.device, dtype=dtype)
    return noise.sub_(0.5).mul_(2 * 3**0.5 * std).add_(aux)
