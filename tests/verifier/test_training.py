"""A drafter for the real verifier: it learns, and decoding accepts what the estimate says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from eagle3.compose import compose_config
from eagle3.config import ModelConfig, OptimConfig
from eagle3.data.vocab import VocabMap
from eagle3.metrics import AcceptanceMetrics
from eagle3.model.build import build_drafter, build_verifier_head
from eagle3.model.drafter import Drafter
from eagle3.model.verifier_head import VerifierHead
from eagle3.model.weights import load_verifier_weights
from eagle3.names import LastHidden, Schedule
from eagle3.optim import LrSchedule, build_optimizer
from eagle3.prefill import capture_sequences
from eagle3.tokens import asset_path, read_token_file, spread_subset
from tests.helpers import Document, judge, pack
from tests.server import decode_greedily

pytestmark = pytest.mark.verifier
TRAINED = 3


@dataclass(frozen=True)
class Trained:
    """A drafter that has learnt the first documents by heart."""

    drafter: Drafter
    head: VerifierHead
    vocab: VocabMap
    documents: list[Document]


@pytest.fixture(scope="module")
def documents(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Document]:
    """Eight short answers with their captured states."""
    asset = [s for s in read_token_file(asset_path()) if 90 < len(s.ids) < 130]
    shards = tmp_path_factory.mktemp("shards")
    capture_sequences(
        smollm2, spread_subset(asset, 8), shards, aux_layer_ids=[3, 16, 28], log=lambda _: None
    )
    samples = [torch.load(shards / f"data_{i}.pt", weights_only=True) for i in range(8)]
    return [
        Document(
            input_ids=sample["input_ids"],
            loss_mask=sample["loss_mask"].bool(),
            aux_hidden=torch.cat(sample["hidden_states"][:-1], dim=-1).float(),
            last_hidden=sample["hidden_states"][-1],
        )
        for sample in samples
    ]


@pytest.fixture(scope="module")
def trained(smollm2: Path, documents: list[Document]) -> Trained:
    config: ModelConfig = replace(compose_config().model, draft_vocab_size=1024)
    answers = torch.cat([document.input_ids[document.loss_mask] for document in documents])
    vocab = VocabMap.from_frequencies(
        torch.bincount(answers, minlength=config.vocab_size), 1024, config.vocab_size
    )
    weights = load_verifier_weights(smollm2, torch.float32)
    drafter = build_drafter(config, vocab, weights, seed=0)
    head = build_verifier_head(vocab, weights, LastHidden.pre_norm, full=False)
    optimizer = build_optimizer(drafter, OptimConfig(), 1e-3)
    schedule = LrSchedule(peak=1e-3, total_steps=60, warmup_steps=5, kind=Schedule.cosine)
    batch = pack(documents[:TRAINED])
    for step in range(schedule.total_steps):
        loss = judge(drafter, head, batch, ttt_steps=2).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        optimizer.step()
    return Trained(drafter, head, vocab, documents)


@torch.no_grad()
def test_overfits_one_pack(trained: Trained) -> None:
    batch = pack(trained.documents[:TRAINED])
    results = judge(trained.drafter, trained.head, batch, ttt_steps=1).steps
    assert float(results[0].correct.double().mean()) > 0.95


@torch.no_grad()
def test_replay_is_what_greedy_decoding_gives(trained: Trained) -> None:
    """Documents known by heart and unseen ones, so that rounds of every length occur."""
    batch = pack(trained.documents)
    results = judge(trained.drafter, trained.head, batch, ttt_steps=3).steps
    metrics = AcceptanceMetrics(3)
    metrics.update(batch, results)
    replayed = metrics.compute()["acceptance_replay"]
    walks = [decode_greedily(trained.drafter, trained.vocab, d, 3) for d in trained.documents]
    decoded = sum(emitted for emitted, _ in walks) / sum(rounds for _, rounds in walks)
    assert 1.2 < decoded < 3.8
    assert replayed == pytest.approx(decoded, rel=0.02)
