"""How documents fill packs of several sizes, and how many bytes an epoch reads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eagle3.data.index import DocumentIndex
from eagle3.data.layout import StateLayout
from eagle3.data.masks import Runs
from eagle3.data.packing import PackingRule, segment_documents
from eagle3.data.plan import packing_report, training_plan
from eagle3.inspection.facts import PackingFacts, ReadFacts


def packing_facts(lengths: NDArray[np.int64], gates: Runs, rule: PackingRule) -> PackingFacts:
    """Pack all documents once.

    Args:
        lengths: [D], tokens of each document.
        gates: rows that are supervised.
        rule: with the ``max_seq_len`` to try.

    Raises:
        ConfigError: context and look-ahead of a split leave no row.
    """
    limit, rows = rule.max_seq_len, int((lengths - 1).sum())
    segmentation = segment_documents(np.arange(len(lengths)), lengths, gates, rule)
    plan = training_plan(segmentation.segments, limit, 0, 0, 1, 1)
    report = packing_report(segmentation, plan, limit, 0)
    return PackingFacts(
        max_seq_len=limit,
        long_documents=report.long_documents,
        packs=report.packs,
        fill=report.fill,
        supervised_share=report.supervised_fraction,
        overhead_share=report.overhead_fraction,
        lost_share=report.lost_tokens / rows,
        lost_if_truncated=float(np.maximum(lengths - 1 - limit, 0).sum() / rows),
    )


def read_facts(
    index: DocumentIndex, layout: StateLayout, gates: Runs, tokens_per_s: float
) -> ReadFacts:
    """Bytes of an epoch over all documents that have a gated row.

    Aux states are read for every row; the last state for gated rows only, as the loader does.
    """
    gated = gates.totals()
    rows = int((index.lengths[gated > 0] - 1).sum())
    aux_bytes = rows * layout.aux_width * index.dtype.itemsize
    last_bytes = layout.hidden_size * index.dtype.itemsize
    epoch_bytes = aux_bytes + int(gated.sum()) * last_bytes
    return ReadFacts(
        rows=rows,
        epoch_bytes=epoch_bytes,
        epoch_bytes_with_all_last=aux_bytes + rows * last_bytes,
        tokens_per_s=tokens_per_s,
        gb_per_s=epoch_bytes / max(rows, 1) * tokens_per_s / 1e9,
    )
