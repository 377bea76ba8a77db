"""The frozen verifier head: the whole vocabulary is met in tiles only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eagle3.model import verifier_head
from eagle3.model.verifier_head import VerifierHead
from eagle3.names import LastHidden

WHOLE, HIDDEN = 103, 16


class _Widest(TorchDispatchMode):
    """The most columns that any two-dimensional result had."""

    columns = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.ndim == 2]
        # a transposed weight is no copy
        self.columns = max([self.columns, *(t.shape[1] for t in made if t.shape[0] == 9)])
        return result


@pytest.mark.parametrize("kind", LastHidden)
def test_tiles_find_what_the_whole_vocabulary_would(
    kind: LastHidden, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of the last, partial tile and ties (the first id counts) included."""
    monkeypatch.setattr(verifier_head, "_TILE_ROWS", 20)
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(WHOLE, HIDDEN, generator=generator)
    whole[77] = whole[3]
    gain = 1 + torch.rand(HIDDEN, generator=generator)
    head = VerifierHead(gain, whole[:7].clone(), eps=1e-5, last_hidden=kind, full_weight=whole)
    states = torch.randn(9, HIDDEN, generator=generator)
    states[0], states[1] = 5 * whole[3] / gain, 5 * whole[102] / gain
    expected = F.linear(head.features(states), whole).argmax(-1)
    with _Widest() as widest:
        found = head.full_argmax(states)
    assert found is not None
    assert torch.equal(found, expected)
    assert found[:2].tolist() == [3, 102]
    assert widest.columns == 20


def test_without_the_whole_head_nothing_is_known() -> None:
    head = VerifierHead(
        torch.ones(4), torch.randn(5, 4), eps=1e-5, last_hidden=LastHidden.post_norm
    )
    assert head.full_argmax(torch.randn(2, 4)) is None
