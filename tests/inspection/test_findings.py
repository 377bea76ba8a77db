"""Every trouble is planted once, found under its name, and found alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eagle3.data.vocab import VocabMap
from eagle3.data.vocab_files import save_vocab_map
from eagle3.errors import DataError, VerifierError
from eagle3.inspection.facts import Audit, Finding, Severity
from eagle3.inspection.stated import GivenFacts
from eagle3.model.layers import rms_norm
from eagle3.names import LastHidden, LayerIdConvention, LongDocuments, TrainOn
from tests.inspection.conftest import Look
from tests.inspection.planted import (
    AUX_IDS,
    CONFIG,
    EPS,
    VOCAB,
    Document,
    capture,
    head,
    states_of,
)

Plant = Callable[[list[Document]], None]


def troubles(audit: Audit) -> dict[str, Severity]:
    """Topic -> severity of everything that is not in order."""
    return {f.topic: f.severity for f in audit.findings if f.severity is not Severity.ok}


def finding(audit: Audit, topic: str) -> Finding:
    (found,) = (f for f in audit.findings if f.topic == topic)
    return found


def test_a_sound_capture_has_nothing_to_complain_of(look: Look, shards: Path) -> None:
    audit = look(shards)
    assert troubles(audit) == {}
    assert not audit.stops
    assert {f.topic for f in audit.findings} == {
        "declaration",
        "files",
        "supervision",
        "all-zero masks",
        "all-one masks",
        "duplicates",
        "packing 128",
        "packing 256",
        "finite states",
        "layers differ",
        "norm",
        "on-policy",
        "layer order",
    }


def nan_row(documents: list[Document]) -> None:
    documents[3]["hidden_states"][1][5, 2] = float("nan")


def inf_row(documents: list[Document]) -> None:
    documents[3]["hidden_states"][-1][5, 2] = float("inf")


def zero_rows(documents: list[Document]) -> None:
    documents[2]["hidden_states"][0][10:14] = 0


def empty_mask(documents: list[Document]) -> None:
    documents[4]["loss_mask"][:] = 0


def full_mask(documents: list[Document]) -> None:
    documents[4]["loss_mask"][:] = 1


def no_mask(documents: list[Document]) -> None:
    for document in documents:
        document["loss_mask"][:] = 0


def nearly_all_supervised(documents: list[Document]) -> None:
    for document in documents:
        document["loss_mask"][1:] = 1


def copy(documents: list[Document]) -> None:
    documents[7] = documents[1]


def permuted(documents: list[Document]) -> None:
    for document in documents:
        low, middle, high, last = document["hidden_states"]
        document["hidden_states"] = [high, middle, low, last]


def stored_twice(documents: list[Document]) -> None:
    for document in documents:
        document["hidden_states"][0] = document["hidden_states"][1]


def post_norm(documents: list[Document]) -> None:
    gain, _ = head()
    for document in documents:
        document["hidden_states"][-1] = rms_norm(document["hidden_states"][-1], gain, EPS)


def other_tokens(share: float) -> Plant:
    """The data go on otherwise than the verifier would, at this share of the tokens."""

    def plant(documents: list[Document]) -> None:
        generator = torch.Generator().manual_seed(1)
        for document in documents:
            ids = document["input_ids"]
            foreign = torch.randint(0, VOCAB, ids.shape, generator=generator)
            ids[:] = torch.where(torch.rand(ids.shape, generator=generator) < share, foreign, ids)

    return plant


def shifted(documents: list[Document]) -> None:
    for document in documents:
        document["hidden_states"] = [s.roll(1, dims=0) for s in document["hidden_states"]]


@pytest.mark.parametrize(
    ("plant", "topic", "severity"),
    [
        (nan_row, "finite states", Severity.stop),
        (inf_row, "finite states", Severity.stop),
        (zero_rows, "zero rows", Severity.stop),
        (empty_mask, "all-zero masks", Severity.warning),
        (full_mask, "all-one masks", Severity.warning),
        (nearly_all_supervised, "supervision", Severity.warning),
        (copy, "duplicates", Severity.warning),
        (permuted, "layer order", Severity.stop),
        (stored_twice, "layers differ", Severity.stop),
        (post_norm, "norm", Severity.stop),
        (other_tokens(0.4), "on-policy", Severity.warning),
        (other_tokens(0.9), "on-policy", Severity.stop),
        (shifted, "on-policy", Severity.stop),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_planted_trouble_is_found_alone(
    look: Look, plant: Plant, topic: str, severity: Severity
) -> None:
    documents = capture()
    plant(documents)
    audit = look(documents)
    assert troubles(audit) == {topic: severity}
    assert finding(audit, topic).action


def test_no_supervised_token_stops(look: Look) -> None:
    documents = capture()
    no_mask(documents)
    audit = look(documents)
    assert finding(audit, "supervision").severity is Severity.stop
    assert audit.agreement is None
    assert audit.contents.supervision.empty.count == len(documents)


def test_named_documents_are_the_planted_ones(look: Look) -> None:
    documents = capture()
    empty_mask(documents)
    copy(documents)
    contents = look(documents).contents
    assert [name.split()[0] for name in contents.supervision.empty.first] == ["data_4.pt"]
    assert [name.split()[0] for name in contents.duplicates.copies.first] == ["data_7.pt"]
    assert contents.duplicates.copies.count == 1


def test_nothing_is_mostly_supervised_when_all_is_wanted(look: Look) -> None:
    documents = capture()
    full_mask(documents)
    audit = look(documents, train_on=TrainOn.all)
    assert troubles(audit) == {}
    assert audit.contents.supervision.share == 1.0


@pytest.mark.parametrize("stored", list(LastHidden))
@pytest.mark.parametrize("declared", [*LastHidden, None])
def test_the_norm_is_judged_whatever_is_declared(
    look: Look, stored: LastHidden, declared: LastHidden | None
) -> None:
    documents = capture()
    if stored is LastHidden.post_norm:
        post_norm(documents)
    given = GivenFacts(tuple(AUX_IDS), LayerIdConvention.entering, declared)
    audit = look(documents, config=None, given=given)
    found = finding(audit, "norm")
    assert audit.agreement is not None
    assert audit.agreement.stored_as == stored
    assert audit.agreement.on_policy > 0.99
    if declared is None:
        assert found.severity is Severity.warning
        assert f"--last-hidden {stored}" in found.action
    else:
        assert found.severity is (Severity.ok if declared is stored else Severity.stop)


def test_what_is_not_declared_is_named_and_not_guessed(look: Look) -> None:
    audit = look(capture(), config=None)
    assert audit.directory.aux_layer_ids is None
    assert audit.directory.last_hidden is None
    found = finding(audit, "declaration")
    assert found.severity is Severity.warning
    for option in ("--aux-layer-ids", "--layer-id-convention", "--last-hidden"):
        assert option in found.action


def test_unknown_norm_is_said_when_figures_contradict(look: Look) -> None:
    """States of a post-norm's size that make sense only when normed once more."""
    documents = capture()
    gain, _ = head()
    for document in documents:
        last = document["hidden_states"][-1]
        rms = (last / gain).square().mean(dim=-1, keepdim=True).sqrt()
        document["hidden_states"][-1] = last / rms
    audit = look(documents)
    assert audit.agreement is not None
    assert audit.agreement.stored_as is None
    assert finding(audit, "norm").severity is Severity.warning


def test_layer_ids_that_the_verifier_does_not_have_stop(look: Look) -> None:
    config = {**CONFIG, "hidden_states": {**CONFIG["hidden_states"], "layer_ids": [2, 4, 9]}}
    assert troubles(look(capture(), config=config)) == {"layer ids": Severity.stop}


def test_a_gap_between_two_close_layers_is_no_disorder(look: Look) -> None:
    """One layer a little below the one before it, within chance."""
    documents = capture()
    generator = torch.Generator().manual_seed(3)
    for document in documents:
        ids = document["input_ids"]
        document["hidden_states"][0] = document["hidden_states"][1].clone()
        document["hidden_states"][0][:, 0] *= 1.1
        changed = torch.rand(len(ids), generator=generator) < 0.02
        document["hidden_states"][1][changed] = states_of(ids[changed], generator)
    assert "layer order" not in troubles(look(documents))


def test_long_documents_cost_and_the_figures_say_what(look: Look) -> None:
    documents = capture(count=4, tokens=200)
    for document in documents:
        document["loss_mask"][30:] = 1
    split = look(documents, max_seq_lens=(64, 256), split_context_tokens=8)
    assert troubles(split) == {"packing 64": Severity.warning}
    assert split.packing[0].lost_share == 0
    assert split.packing[0].overhead_share > 0.05
    assert split.packing[0].lost_if_truncated == pytest.approx(1 - 64 * 4 / (199 * 4 + 6))
    planted = Path(split.directory.path)
    cut = look(planted, max_seq_lens=(64,), long_documents=LongDocuments.truncate)
    assert troubles(cut) == {"packing 64": Severity.warning}
    assert cut.packing[0].lost_share == pytest.approx(split.packing[0].lost_if_truncated)


def test_damaged_files_are_counted_with_their_reasons(look: Look, shards: Path) -> None:
    content = (shards / "data_5.pt").read_bytes()
    (shards / "data_5.pt").write_bytes(content[: len(content) // 2])
    audit = look(shards)
    assert troubles(audit) == {"files": Severity.stop}
    (bad,) = audit.directory.bad_files
    assert bad.path.endswith("data_5.pt")
    assert "data_5.pt" in bad.reason
    assert audit.contents.documents == 11


def test_a_document_that_changed_since_it_was_indexed_is_reported(look: Look, shards: Path) -> None:
    look(shards)  # the index is cached
    path = shards / "data_2.pt"
    stat = path.stat()
    content = bytearray(path.read_bytes())
    at = content.find(torch.load(path)["input_ids"].numpy().tobytes())
    content[at] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    audit = look(shards)
    assert troubles(audit) == {"reading": Severity.stop}
    assert audit.states.unreadable[0].path == str(path)
    assert audit.states.documents == 11


def test_too_few_tokens_conclude_nothing(look: Look) -> None:
    audit = look(capture(count=2, tokens=12))
    assert troubles(audit) == {"verifier": Severity.warning}


def test_without_a_verifier_it_is_said_what_was_not_checked(look: Look, shards: Path) -> None:
    audit = look(shards, verifier=None)
    assert troubles(audit) == {"verifier": Severity.warning}
    assert audit.agreement is None


def test_draft_vocabulary_is_judged_by_the_supervised_tokens(
    look: Look, shards: Path, tmp_path: Path
) -> None:
    small, whole = tmp_path / "small.safetensors", tmp_path / "whole.safetensors"
    save_vocab_map(small, VocabMap.from_selected(range(10), VOCAB))
    save_vocab_map(whole, VocabMap.identity(VOCAB))
    low = look(shards, vocab_map=small)
    assert troubles(low) == {"draft vocabulary": Severity.warning}
    assert low.vocab is not None
    assert low.vocab.coverage == pytest.approx(0.25, abs=0.07)
    high = look(shards, vocab_map=whole)
    assert high.vocab is not None
    assert high.vocab.coverage == 1.0
    assert high.vocab.tokens == high.contents.supervision.tokens


def test_other_number_of_layers_than_said_is_refused(look: Look, shards: Path) -> None:
    with pytest.raises(DataError, match="found 4 tensors, expected 3"):
        look(shards, given=GivenFacts(num_aux_layers=2))


def test_a_verifier_without_weights_is_refused(look: Look, shards: Path, tmp_path: Path) -> None:
    with pytest.raises(VerifierError, match=r"config\.json"):
        look(shards, verifier=tmp_path)
