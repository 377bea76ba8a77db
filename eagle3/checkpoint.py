"""A checkpoint of a run, read without running anything in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from eagle3.errors import DataError


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The content of a checkpoint; tensors stay on disk until they are used.

    Returns:
        At least ``state_dict``, and under ``eagle3`` what the module says beside it, such as
        ``config``.

    Raises:
        DataError: it is missing, damaged, or none of this package.
    """
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        content["eagle3"]["config"], content["state_dict"]
    except FileNotFoundError as error:
        raise DataError(
            f"{path}: found no such file, expected a checkpoint such as RUN/checkpoints/best.ckpt"
        ) from error
    except Exception as error:  # a cut or foreign file fails in ever other ways
        raise DataError(
            f"{path}: found no checkpoint of this package ({error!s:.120}), expected one such as "
            "RUN/checkpoints/best.ckpt"
        ) from error
    assert isinstance(content, dict)
    return content
