"""The audit on states of the real verifier."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from eagle3.inspection.audit import AuditRequest, run_audit
from eagle3.inspection.facts import Audit
from eagle3.prefill import capture_sequences
from eagle3.tokens import asset_path, read_token_file, spread_subset

pytestmark = pytest.mark.verifier


@pytest.fixture(scope="module")
def shards(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six short answers with their states."""
    short = [s for s in read_token_file(asset_path()) if 90 < len(s.ids) < 130]
    directory = tmp_path_factory.mktemp("inspected") / "shards"
    capture_sequences(
        smollm2, spread_subset(short, 6), directory, aux_layer_ids=[3, 16, 28], log=lambda _: None
    )
    return directory


def look(directory: Path, verifier: Path, cache: Path) -> Audit:
    request = AuditRequest(directory, cache, verifier=verifier, max_seq_lens=(256,))
    return run_audit(request, lambda line: None)


def test_greedy_answers_of_the_verifier_pass(smollm2: Path, shards: Path, tmp_path: Path) -> None:
    audit = look(shards, smollm2, tmp_path)
    found = audit.agreement
    assert found is not None
    assert not audit.stops
    assert found.stored_as == "pre_norm"
    assert found.on_policy > 0.97
    assert found.pre_norm_rate - found.post_norm_rate > 0.5
    low, middle, high = found.lens
    assert low < middle < high
    assert audit.shown[0].spans[1].text.endswith("<|im_end|>")


def test_permuted_layers_stop(smollm2: Path, shards: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(shards, tmp_path / "permuted")
    for path in directory.glob("data_*.pt"):
        content = torch.load(path, weights_only=True)
        low, middle, high, last = content["hidden_states"]
        torch.save({**content, "hidden_states": [high, low, middle, last]}, path)
    audit = look(directory, smollm2, tmp_path / "cache")
    assert [finding.topic for finding in audit.stops] == ["layer order"]
