"""Acceptance metrics as sums and counts, right over any split of the rows into packs and ranks.

Rows of a chain: start i counts at step s when gates l_{i+1}..l_{i+1+s} are all one, so a perfect
drafter scores 1.0 everywhere. Two acceptance lengths (tokens per verifier pass, bonus included):

* pooled: ``1 + sum_s P(steps 0..s all right)`` over all chain starts. Too kind: real rounds start
  after a miss, where text is harder.
* replay: walk each answer as a server would. Start at row i, a drafts accepted, the next round
  starts at i + a + 1; length = tokens emitted / rounds. The one to trust and to select by. Row i
  emits x_{i+2}, so rows are walked whose gates l_{i+1} and l_{i+2} are one: the first answer
  token comes from the prefill, and nothing is drafted after the last.

A round never leaves its answer, so the rounds of a pack are those of its documents, and the figures
of one source of documents come from walking its documents only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics import Metric

from eagle3.data.batch import PackedBatch
from eagle3.objective import StepResult
from eagle3.replay import replay, walk

LENGTH_BUCKETS = (("0-1k", 1024), ("1-2k", 2048), ("2-4k", 4096), ("4-8k", 8192))
_LAST_BUCKET = "8k+"
_SOURCE_COUNTS = ("chains", "right", "emitted", "rounds")


@dataclass(frozen=True)
class ChainResults:
    """Per start row and draft step of one pack, [L, S]."""

    gated: Tensor
    """bool: start trained here and every gate up to this step is one."""
    accepted: Tensor
    """bool: gated, and right at this and every earlier step."""
    correct: Tensor
    """bool: gated and right at this step."""
    overlap: Tensor
    """float: sum_v min(p_v, q_v) where gated; zero on uncovered rows."""


def chain_results(batch: PackedBatch, results: Sequence[StepResult]) -> ChainResults:
    """Arrange the judged rows of one trimmed pack by start row and step."""
    shape = (len(batch), len(results))
    judged = torch.zeros(shape, dtype=torch.bool, device=batch.input_ids.device)
    correct = torch.zeros_like(judged)
    overlap = torch.zeros(shape, dtype=torch.float32, device=judged.device)
    for step, result in enumerate(results):
        rows = result.rows.starts
        judged[rows, step] = True
        correct[rows, step] = result.correct
        assert result.overlap is not None, "run the pack with_overlap"
        overlap[rows, step] = result.overlap.float() * result.covered
    gated = judged.cumprod(dim=1).bool()
    correct &= gated
    return ChainResults(gated, correct.cumprod(dim=1).bool(), correct, overlap * gated)


class AcceptanceMetrics(Metric):
    """Everything validation reports, as float64 sums that ranks add up.

    Args:
        draft_steps: S.
        sources: labels of documents to report apart, the same on every rank; with less than two
            nothing is told apart. Documents with another label, or none, are in the totals only.
    """

    full_state_update = False

    chains: Tensor
    accepted: Tensor
    conditional: Tensor
    overlap: Tensor
    rows: Tensor
    loss: Tensor
    top1: Tensor
    covered: Tensor
    emitted: Tensor
    rounds: Tensor
    round_accepted: Tensor
    bucket_rows: Tensor
    bucket_right: Tensor
    by_source: Tensor

    def __init__(self, draft_steps: int, sources: Sequence[str] = ()) -> None:
        super().__init__()
        self.sources = tuple(sources) if len(sources) > 1 else ()
        buckets = len(LENGTH_BUCKETS) + 1
        by_step = ("chains", "accepted", "conditional", "overlap", "rows", "loss")
        sizes = dict.fromkeys((*by_step, "round_accepted"), draft_steps)
        sizes |= dict.fromkeys(("top1", "covered", "emitted", "rounds"), 1)
        sizes |= dict.fromkeys(("bucket_rows", "bucket_right"), buckets)
        # the last row holds documents of other labels
        shapes = {name: (size,) for name, size in sizes.items()}
        states = shapes | {"by_source": (len(self.sources) + 1, len(_SOURCE_COUNTS))}
        for name, shape in states.items():
            zero = torch.zeros(shape, dtype=torch.float64)
            self.add_state(name, default=zero, dist_reduce_fx="sum")

    def update(self, batch: PackedBatch, results: Sequence[StepResult]) -> None:
        """Add one trimmed pack and the judged rows of its draft steps."""
        chain = chain_results(batch, results)
        before = torch.cat((chain.gated[:, :1], chain.accepted[:, :-1]), dim=1) & chain.gated
        self.chains += chain.gated.sum(0)
        self.accepted += chain.accepted.sum(0)
        self.conditional += before.sum(0)
        self.overlap += chain.overlap.double().sum(0)
        for step, result in enumerate(results):
            self.rows[step] += result.losses.numel()
            self.loss[step] += result.losses.double().sum()
        self.top1 += chain.correct[:, 0].sum()
        self.covered += results[0].covered.sum()
        self._add_lengths(batch, chain)
        self._add_replay(batch, chain)

    def _add_lengths(self, batch: PackedBatch, chain: ChainResults) -> None:
        limits = torch.tensor([limit for _, limit in LENGTH_BUCKETS], device=chain.gated.device)
        lengths = torch.tensor(batch.document_lengths, device=limits.device, dtype=torch.int64)
        if not lengths.numel():
            return
        bucket = torch.bucketize(lengths, limits)[batch.document_ids]
        self.bucket_rows.index_add_(0, bucket, chain.gated[:, 0].double())
        self.bucket_right.index_add_(0, bucket, chain.correct[:, 0].double())

    def _add_replay(self, batch: PackedBatch, chain: ChainResults) -> None:
        documents = batch.document_ids
        emits = torch.zeros_like(batch.loss_mask)
        emits[:-1] = batch.loss_mask[1:] & (documents[1:] == documents[:-1])
        walkable = (emits & chain.gated[:, 0]).cpu().numpy()
        accepted = chain.accepted.sum(1).cpu().numpy()
        emitted, taken = walk(walkable, accepted)
        self.emitted += int(emitted.sum())
        self.rounds += len(emitted)
        for step in range(len(self.round_accepted)):
            self.round_accepted[step] += int((taken > step).sum())
        if self.sources:
            self._add_sources(batch, chain, walkable, accepted)

    def _add_sources(
        self,
        batch: PackedBatch,
        chain: ChainResults,
        walkable: NDArray[np.bool_],
        accepted: NDArray[np.int64],
    ) -> None:
        place = {name: number for number, name in enumerate(self.sources)}
        labels = batch.document_sources or ("",) * len(batch.document_lengths)
        places = np.array([place.get(label, len(place)) for label in labels], np.int64)
        source = places[batch.document_ids.cpu().numpy()]
        for number in np.unique(source).tolist():
            rows = source == number
            here = torch.from_numpy(rows).to(chain.gated.device)
            counts = (
                int((chain.gated[:, 0] & here).sum()),
                int((chain.correct[:, 0] & here).sum()),
                *replay(walkable & rows, accepted),
            )
            self.by_source[number] += torch.tensor(counts).to(self.by_source)

    def compute(self) -> dict[str, float]:
        """Names as they stand on the dashboard, without the ``val/`` prefix.

        Without a judged row nothing but a NaN acceptance is known; it is NaN also where no answer
        has two supervised tokens in a row, since then no round is walked.
        """
        if self.chains[0] == 0:
            return {"acceptance_replay": math.nan}
        prefix = _ratio(self.accepted, self.chains)
        out = {
            "acceptance_replay": (
                float(self.emitted / self.rounds) if self.rounds > 0 else math.nan
            ),
            "acceptance_pooled": 1.0 + float(prefix.sum()),
            "accuracy": float(_ratio(self.top1, self.chains[:1])),
            "coverage": float(_ratio(self.covered, self.rows[:1])),
            "loss": float(_ratio(self.loss, self.rows).mean()),
        }
        conditional = _ratio(self.accepted, self.conditional)
        overlap = _ratio(self.overlap, self.chains)
        by_round = _ratio(self.round_accepted, self.rounds)
        for step in range(len(prefix)):
            out[f"full_acc/{step}"] = float(prefix[step])
            out[f"round_acc/{step}"] = float(by_round[step])
            out[f"cond_acc/{step}"] = float(conditional[step])
            out[f"accept_rate/{step}"] = float(overlap[step])
        names = [name for name, _ in LENGTH_BUCKETS] + [_LAST_BUCKET]
        by_length = _ratio(self.bucket_right, self.bucket_rows)
        for index, name in enumerate(names):
            if self.bucket_rows[index] > 0:
                out[f"accuracy_by_length/{name}"] = float(by_length[index])
        return out | self._source_values()

    def _source_values(self) -> dict[str, float]:
        """Figures of every source that has a judged row."""
        chains, right, emitted, rounds = self.by_source.T
        accuracy, acceptance = _ratio(right, chains), _ratio(emitted, rounds)
        out = {}
        for number, name in enumerate(self.sources):
            if chains[number] > 0:
                out[f"accuracy_by_source/{name}"] = float(accuracy[number])
            if rounds[number] > 0:
                out[f"acceptance_by_source/{name}"] = float(acceptance[number])
        return out


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole, and 0 where nothing was counted."""
    return part / whole.clamp(min=1)
