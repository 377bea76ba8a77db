"""TTT attention when only some rows ask: what they get is what all rows would have got."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle3.ops.ttt_attention import IMPLEMENTATIONS, DocumentLayout, ttt_attention

ROW_STARTS = (0, 5, 6, 13)


def _inputs(rows: int, heads: tuple[int, int], step: int, dim: int = 8) -> list[Tensor]:
    """Query, then keys, then values of steps 0..step, of all rows, float64."""
    generator = torch.Generator().manual_seed(rows + 10 * step)
    counts = [heads[0]] + [heads[1]] * (2 * (step + 1))
    shapes = [(rows, count, dim) for count in counts]
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return [tensor.requires_grad_() for tensor in tensors]


def _run(
    tensors: list[Tensor],
    row_starts: tuple[int, ...],
    implementation: str,
    window: int | None,
    asking: Tensor | None = None,
) -> Tensor:
    """``asking``: these rows of query and own-column keys only."""
    steps = len(tensors) // 2
    if asking is not None:
        whole = (1, 1 + steps)
        tensors = [t if i in whole else t[asking] for i, t in enumerate(tensors)]
    return ttt_attention(
        tensors[0],
        tensors[1 : 1 + steps],
        tensors[1 + steps :],
        DocumentLayout(row_starts, asking),
        implementation=implementation,
        window=window,
    )


ASKING = {
    "a_tail": [5, 6, 7, 8, 9, 10, 11, 12],
    "answers": [2, 3, 4, 7, 8, 12],
    "one_row": [6],
    "all": list(range(13)),
    "none": [],
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rows", ASKING.values(), ids=ASKING)
@pytest.mark.parametrize("window", [None, 1, 4], ids=lambda w: f"window_{w}")
@pytest.mark.parametrize("heads", [(4, 2), (2, 2)], ids=["gqa", "mha"])
def test_rows_that_ask_get_what_all_rows_would(
    implementation: str, rows: list[int], window: int | None, heads: tuple[int, int]
) -> None:
    """Output and every gradient, those of rows that do not ask included."""
    asking, row_starts = torch.tensor(rows, dtype=torch.int64), ROW_STARTS
    upstream = torch.randn(13, heads[0], 8, generator=torch.Generator().manual_seed(2)).double()
    silent = torch.ones(13, dtype=torch.bool)
    silent[asking] = False
    for step in (0, 1, 4):
        tensors = _inputs(13, heads, step)
        whole = _run(tensors, row_starts, "reference", window)
        upstream[silent] = 0
        expected = torch.autograd.grad(whole, tensors, upstream)
        out = _run(tensors, row_starts, implementation, window, asking)
        found = torch.autograd.grad(out, tensors, upstream[asking])
        torch.testing.assert_close(out, whole[asking], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    share=st.floats(0.0, 1.0),
    window=st.sampled_from([None, 3, 70]),
    seed=st.integers(0, 999),
)
def test_any_rows_may_ask(lengths: list[int], share: float, window: int | None, seed: int) -> None:
    """Long gaps, short gaps, documents without a row that asks."""
    row_starts = (0, *accumulate(lengths))
    generator = torch.Generator().manual_seed(seed)
    asking = (torch.rand(row_starts[-1], generator=generator) < share).nonzero()[:, 0]
    tensors = _inputs(row_starts[-1], (2, 1), step=2, dim=4)
    found = [
        [out, *torch.autograd.grad(out.square().sum(), tensors)]
        for out in (_run(tensors, row_starts, name, window, asking) for name in IMPLEMENTATIONS)
    ]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-9, atol=1e-11)


def test_spans_of_the_drawing() -> None:
    layout = DocumentLayout((0, 7, 10), torch.tensor([2, 3, 5, 6, 8]))
    assert [(s.document_start, s.first, s.stop, s.columns, s.offsets) for s in layout.spans] == [
        (0, 2, 7, slice(0, 4), (0, 1, 3, 4)),
        (7, 8, 9, slice(4, 5), None),
    ]
