"""One training step on a CUDA device against the plain path on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from eagle3.config import ComputeConfig
from eagle3.data.batch import PackedBatch
from eagle3.names import Recompute
from eagle3.ops.distillation import LOSSES, closed_form
from tests.helpers import TINY, judge, make_document, pack, tiny_drafter, tiny_head

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIG = replace(
    TINY, hidden_size=64, head_dim=32, num_attention_heads=4, num_key_value_heads=2,
    draft_vocab_size=50,
)  # fmt: skip
FAST = {"fast": ComputeConfig(), "recompute": ComputeConfig(recompute=Recompute.mlp)}


def _gradients(device: str, compute: ComputeConfig, autocast: bool) -> dict[str, Tensor]:
    drafter, head = tiny_drafter(CONFIG).to(device), tiny_head(CONFIG).to(device)
    batch: PackedBatch = pack([make_document(n, n, CONFIG) for n in (70, 9, 131)]).to(device)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        result = judge(drafter, head, batch, ttt_steps=4, compute=compute)
    result.loss.backward()
    found = {"loss": result.loss.detach()}
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad
    return {name: tensor.double().cpu() for name, tensor in found.items()}


@pytest.mark.parametrize("compute", FAST.values(), ids=FAST)
def test_float32_equals_the_plain_path_on_cpu(compute: ComputeConfig) -> None:
    expected = _gradients("cpu", ComputeConfig.reference(), autocast=False)
    found = _gradients("cuda", compute, autocast=False)
    for name, truth in expected.items():
        assert torch.linalg.vector_norm(found[name] - truth) <= 1e-4 * truth.norm(), name


@pytest.mark.parametrize("compute", FAST.values(), ids=FAST)
def test_bfloat16_autocast_stays_near_float32(compute: ComputeConfig) -> None:
    """Flash attention over packed documents, Triton kernels, products in bfloat16."""
    expected = _gradients("cpu", ComputeConfig.reference(), autocast=False)
    found = _gradients("cuda", compute, autocast=True)
    for name, truth in expected.items():
        assert torch.linalg.vector_norm(found[name] - truth) <= 5e-2 * truth.norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", LOSSES)
def test_row_kernel_equals_the_closed_form(name: str, dtype: torch.dtype) -> None:
    from eagle3.ops.distillation import triton_rows  # imports Triton

    generator = torch.Generator().manual_seed(0)
    draft, verifier = (3 * torch.randn(n, 32_000, generator=generator) for n in (40, 13))
    draft, verifier = draft.to(dtype), verifier.to(dtype)
    targets = torch.arange(40) % 13
    weights = torch.rand(40, generator=generator)
    results = []
    for module, device in ((closed_form, "cpu"), (triton_rows, "cuda")):
        logits = draft.to(device, copy=True)
        found = module.row_statistics(
            logits, verifier.to(device), targets.to(device), [(name, 1.0)],
            weights=weights.to(device), with_overlap=True,
        )  # fmt: skip
        assert found.overlap is not None
        results.append([t.cpu() for t in (found.loss, found.overlap, found.draft_best, logits)])
    expected, found_here = results
    torch.testing.assert_close(found_here[:3], expected[:3], rtol=1e-4, atol=1e-5)
    limit = 1e-2 if dtype is torch.bfloat16 else 1e-4
    error = (found_here[3].double() - expected[3].double()).norm()
    assert error <= limit * expected[3].double().norm()
