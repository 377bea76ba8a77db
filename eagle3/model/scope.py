"""A place where a module's weights are whole, for work that is no call of the module.

The unroll and the loss use weights of the drafter outside of ``forward``. Where the weights are
shared out over ranks, only a call that sharding knows of gathers them; ``within`` is that call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

Found = TypeVar("Found")


class Scope(nn.Module):
    """A module whose weights other code reads, inside of :meth:`within`."""

    def within(self, work: Callable[..., Found], *inputs: object) -> Found:
        """``work(*inputs)``.

        Args:
            work: returns a tensor, or a tuple or list with tensors, so that sharding finds those
                through which a gradient will come back.
            inputs: tensors, or lists of them, through which it leaves.
        """
        return work(*inputs)


class Head(nn.Linear, Scope):
    """A linear map whose weight the loss multiplies by itself."""
