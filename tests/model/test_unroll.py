"""The packed TTT pass against drafting token by token, and its independence of packing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from eagle3.config import ComputeConfig, ModelConfig
from eagle3.data.batch import PackedBatch
from eagle3.data.packing import PackingRule, Segment, split_rows
from eagle3.data.sample import Sample
from eagle3.model.drafter import Drafter
from eagle3.model.layers import NormLayout
from eagle3.model.ttt import step_rows, unroll
from eagle3.names import Arch, AttentionImpl, EmbeddingHalf, LongDocuments
from eagle3.objective import row_counts
from tests.data.laying import lay
from tests.helpers import (
    TINY,
    Document,
    judge,
    make_document,
    pack,
    tiny_drafter,
    tiny_head,
    with_garbage_padding,
)
from tests.server import Server, draft_as_server

COMPUTE = {
    "fast": ComputeConfig(),
    "plain": ComputeConfig.reference(),
    "dense": ComputeConfig(attention=AttentionImpl.reference),
    "each_step": ComputeConfig(embedding_half=EmbeddingHalf.each_step),
}
ALL_WAYS = pytest.mark.parametrize("compute", COMPUTE.values(), ids=COMPUTE)


def packed_logits(
    drafter: Drafter, batch: PackedBatch, steps: int, compute: ComputeConfig = COMPUTE["fast"]
) -> list[Tensor]:
    batch = batch.trim()
    return [drafter.logits(h) for h in unroll(drafter, batch, batch.aux_hidden, steps, compute)]


@torch.no_grad()
@ALL_WAYS
@pytest.mark.parametrize(
    ("changes", "norms"),
    [
        ({}, NormLayout()),
        ({"arch": Arch.qwen3}, NormLayout()),
        ({"sliding_window": 6}, NormLayout()),
        ({"num_key_value_heads": 4}, NormLayout(norm_before_residual=True, norm_before_fc=True)),
        ({}, NormLayout(fc_norm=True, norm_output=True)),
    ],
    ids=["plain", "qwen3", "window", "speculators-like", "eagle3.1"],
)
def test_packed_pass_equals_a_server(
    compute: ComputeConfig, changes: dict[str, object], norms: NormLayout
) -> None:
    config: ModelConfig = replace(TINY, **changes)  # type: ignore[arg-type]
    drafter = tiny_drafter(config, norms=norms)
    documents = [make_document(11, 1), make_document(2, 2), make_document(8, 3)]
    steps = 4
    packed = packed_logits(drafter, pack(documents, padding=3), steps, compute)
    first = 0
    for document in documents:
        wanted = draft_as_server(drafter, document, steps)
        assert len(wanted) == sum(max(0, len(document) - 1 - s) for s in range(steps))
        for (row, step), logits in wanted.items():
            torch.testing.assert_close(packed[step][first + row], logits, rtol=0, atol=1e-4)
        first += len(document) - 1


@torch.no_grad()
def test_a_round_that_starts_mid_answer_reads_the_same_cache() -> None:
    """Accept two drafts, then draft again: cache entries of accepted tokens are recomputed."""
    drafter, document = tiny_drafter(), make_document(10, 4)
    server, fused = Server(drafter), drafter.fuse(document.aux_hidden)
    for row in range(3):
        server.feed(document.input_ids[row + 1], fused[row], row)
    output = server.feed(document.input_ids[4], fused[3], 3)
    hidden = drafter.feedback(output[None])[0]
    server.feed(document.input_ids[5], hidden, 4)
    server.rollback(4)
    for row in (4, 5):
        output = server.feed(document.input_ids[row + 1], fused[row], row)
    logits = drafter.logits(output[None])[0]
    packed = packed_logits(drafter, pack([document]), 1)
    torch.testing.assert_close(packed[0][5], logits, rtol=0, atol=1e-5)


@ALL_WAYS
def test_packing_changes_nothing(compute: ComputeConfig) -> None:
    """A and B together: logits, loss sums and gradients of A alone plus B alone."""
    drafter, head = tiny_drafter(), tiny_head()
    a, b = make_document(9, 5), make_document(7, 6, mask=[1] * 7)
    steps, counts = 4, torch.ones(4, dtype=torch.int64)

    def run(batch: PackedBatch) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
        batch = batch.trim()
        drafter.zero_grad(set_to_none=True)
        result = judge(
            drafter, head, batch,
            ttt_steps=steps, compute=compute, counts=counts, step_loss_decay=0.9,
        )  # fmt: skip
        result.loss.backward()
        grads = {n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None}
        with torch.no_grad():
            logits = packed_logits(drafter, batch, steps, compute)
        return logits, [step.losses.sum() for step in result.steps], grads

    logits_a, loss_a, grads_a = run(pack([a]))
    logits_b, loss_b, grads_b = run(pack([b]))
    for batch in (pack([a, b]), pack([a, b], padding=5)):
        for garbage in (0.0, float("inf")):
            logits, loss, grads = run(with_garbage_padding(batch, garbage))
            for step in range(steps):
                rows_a, rows_b = len(a) - 1 - step, len(b) - 1 - step
                torch.testing.assert_close(logits[step][:rows_a], logits_a[step][:rows_a])
                second = logits[step][len(a) - 1 :][:rows_b]
                torch.testing.assert_close(second, logits_b[step][:rows_b])
                torch.testing.assert_close(loss[step], loss_a[step] + loss_b[step])
            for name, grad in grads.items():
                torch.testing.assert_close(
                    grad, grads_a[name] + grads_b[name], rtol=1e-4, atol=1e-5
                )


def test_rows_per_step_do_not_depend_on_packing_order() -> None:
    """Two documents of 4 tokens, three steps: max(0, n - 1 - s) rows each."""
    a, b = make_document(4, 7, mask=[1] * 4), make_document(4, 8, mask=[1] * 4)
    for documents in ([a, b], [b, a]):
        counts = row_counts([pack(documents, padding=2).trim()], 4)
        assert counts.tolist() == [6, 4, 2, 0]


def test_the_mask_gates_the_input_token() -> None:
    """ids 0..5 with mask 0 0 1 1 1 0: rows 1, 2, 3 are trained at step 0, and no row past n - 2."""
    document = make_document(6, 9, mask=[0, 0, 1, 1, 1, 0])
    batch = pack([document], padding=2).trim()
    assert len(batch) == 5
    assert step_rows(batch, 0).starts.tolist() == [1, 2, 3]
    assert step_rows(batch, 2).starts.tolist() == [0, 1]
    assert step_rows(batch, 2).targets.tolist() == [2, 3]
    drafter, head = tiny_drafter(), tiny_head()
    aux = batch.aux_hidden.clone().requires_grad_()
    judge(drafter, head, replace(batch, aux_hidden=aux), ttt_steps=1).loss.backward()
    assert aux.grad is not None
    assert bool(aux.grad[:4].abs().sum(1).gt(0).all())
    assert float(aux.grad[4:].abs().sum()) == 0.0


def test_a_context_row_is_a_key_but_never_trained() -> None:
    document = make_document(8, 10, mask=[1] * 8)
    whole = pack([document])
    start = whole.start_mask.clone()
    start[:3] = False
    batch = replace(whole, start_mask=start)
    assert step_rows(batch, 0).starts.tolist() == [3, 4, 5, 6]
    drafter, head = tiny_drafter(), tiny_head()
    full = judge(drafter, head, whole, ttt_steps=2).steps
    part = judge(drafter, head, batch, ttt_steps=2).steps
    torch.testing.assert_close(part[0].losses, full[0].losses[3:])
    torch.testing.assert_close(part[1].losses, full[1].losses[3:])


@ALL_WAYS
def test_an_empty_pack_gives_exact_zeros_with_a_graph(compute: ComputeConfig) -> None:
    drafter, head = tiny_drafter(), tiny_head()
    batch = pack([make_document(5, 11)], padding=1)
    nothing = replace(batch, document_ids=torch.full_like(batch.document_ids, -1)).trim()
    assert len(nothing) == 0
    counts = torch.tensor([4, 2, 0])
    loss = judge(drafter, head, nothing, ttt_steps=3, compute=compute, counts=counts).loss
    assert float(loss.detach()) == 0.0
    loss.backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().sum()) == 0.0, name


@torch.no_grad()
def test_a_split_document_drafts_as_a_server_that_lost_its_first_rows() -> None:
    """Segments of a split against a server whose cache starts at the segment's first row.

    With all earlier rows as context the segment's own rows equal the whole document's.
    """
    drafter, document, steps = tiny_drafter(), make_document(23, 12, mask=[1] * 23), 3
    rule = PackingRule(
        max_seq_len=14, long_documents=LongDocuments.split, split_context_tokens=4, steps=steps
    )
    for segments in (split_rows(0, 22, rule), _with_all_context(22)):
        for segment in segments:
            sample = Sample(
                document.input_ids,
                document.loss_mask,
                document.aux_hidden,
                document.last_hidden,
            )
            batch = lay([segment], [sample], max_seq_len=30).trim()
            packed = packed_logits(drafter, batch, steps)
            rest = Document(
                document.input_ids[segment.start :],
                document.loss_mask[segment.start :],
                document.aux_hidden[segment.start :],
                document.last_hidden[segment.start :],
            )
            served = draft_as_server(drafter, rest, steps)
            for step in range(steps):
                trained = step_rows(batch, step).starts.tolist()
                owned = range(segment.own_start, min(segment.own_stop, 22 - step))
                assert trained == [row - segment.start for row in owned]
                for row in trained:
                    torch.testing.assert_close(
                        packed[step][row], served[row, step], rtol=0, atol=1e-4
                    )


def _with_all_context(rows: int) -> list[Segment]:
    return [Segment(0, 0, 14, 0, 12), Segment(0, 0, rows, 12, rows)]
