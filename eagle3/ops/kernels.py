"""Where Triton kernels run."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

from torch import Tensor


def available(tensor: Tensor) -> bool:
    """Whether a Triton kernel can take this tensor; false for all where Triton is not installed.

    CUDA tensors, and CPU tensors in the interpreter of ``TRITON_INTERPRET=1``, which is far too
    slow for anything but tests. Triton itself is not imported to tell.
    """
    return (tensor.is_cuda or (_interpreted() and tensor.device.type == "cpu")) and _installed()


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


@cache
def _installed() -> bool:
    return find_spec("triton") is not None
