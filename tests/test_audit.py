"""The probe that catches a last state declared the wrong way round, and the size of noise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eagle3.audit import aux_rms, noise_line, probe_last_hidden
from eagle3.data.batch import PackedBatch
from eagle3.data.vocab import VocabMap
from eagle3.errors import DataError
from eagle3.model.layers import rms_norm
from eagle3.model.verifier_head import VerifierHead
from eagle3.names import LastHidden
from tests.helpers import TINY, make_document, pack

VOCAB = VocabMap.identity(TINY.vocab_size)


def head(last_hidden: LastHidden) -> VerifierHead:
    """A head and a gain strong enough that leaving the norm out changes the best token."""
    generator = torch.Generator().manual_seed(5)
    gain = torch.exp(1.5 * torch.randn(TINY.hidden_size, generator=generator))
    weight = torch.randn(TINY.vocab_size, TINY.hidden_size, generator=generator)
    return VerifierHead(gain, weight, eps=1e-5, last_hidden=last_hidden)


def on_policy(stored: LastHidden) -> PackedBatch:
    """Greedy data: every next token is the verifier's argmax."""
    batch = pack([make_document(80, 1, mask=[1] * 80)])
    pre_norm = head(LastHidden.pre_norm)
    best = pre_norm(batch.last_hidden).argmax(-1)
    next_ids = torch.where(batch.next_ids < 0, batch.next_ids, best)
    last = batch.last_hidden
    if stored is LastHidden.post_norm:
        last = rms_norm(last, pre_norm.norm_weight, 1e-5)
    return replace(batch, next_ids=next_ids, last_hidden=last)


@pytest.mark.parametrize("stored", list(LastHidden))
def test_the_right_declaration_passes(stored: LastHidden) -> None:
    probe = probe_last_hidden(head(stored), on_policy(stored), VOCAB)
    assert probe.declared_rate == 1.0
    assert probe.rows == 78
    probe.check()
    assert "100.0% of 78 rows" in probe.lines()[0]


@pytest.mark.parametrize(
    ("stored", "declared"),
    [
        (LastHidden.pre_norm, LastHidden.post_norm),
        (LastHidden.post_norm, LastHidden.pre_norm),
    ],
)
def test_the_wrong_declaration_stops_and_names_the_other(
    stored: LastHidden, declared: LastHidden
) -> None:
    probe = probe_last_hidden(head(declared), on_policy(stored), VOCAB)
    with pytest.raises(DataError, match=rf"set data.last_hidden={stored}"):
        probe.check()


def test_tokens_of_another_model_warn_and_do_not_stop() -> None:
    batch = pack([make_document(80, 2, mask=[1] * 80)])
    probe = probe_last_hidden(head(LastHidden.pre_norm), batch, VOCAB)
    probe.check()
    assert probe.declared_rate < 0.2
    assert "regenerate the responses" in probe.lines()[1]


def test_too_few_rows_judge_nothing() -> None:
    batch = pack([make_document(6, 3)])
    probe = probe_last_hidden(head(LastHidden.post_norm), batch, VOCAB)
    probe.check()
    assert "not checked" in probe.lines()[0]


def test_noise_is_stated_beside_the_size_of_each_layer() -> None:
    batch = pack([make_document(30, 4)])
    scaled = batch.aux_hidden.clone()
    scaled[:, TINY.hidden_size : 2 * TINY.hidden_size] *= 10
    scaled[0] *= 1000
    batch = replace(batch, aux_hidden=scaled)
    low, middle, _ = aux_rms(batch, 3)
    assert 0.7 < low < 1.3
    assert 7 < middle < 13
    line = noise_line(batch, 3, 0.05)
    assert line.startswith("noise: std 0.05 = ")
    assert line.count("%") == 3
