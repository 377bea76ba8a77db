"""From prompts and token ids to states: what is stored is what the verifier computes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3.capturing.plan import plan_capture
from eagle3.capturing.running import _fill, forecast
from eagle3.capturing.verifying import verify
from eagle3.conversations.masking import masked_tokens
from eagle3.conversations.messages import Conversation
from eagle3.conversations.reading import read_conversations
from eagle3.conversations.template import ChatTemplate
from eagle3.data.bad_samples import BadSamples
from eagle3.data.native_manifest import read_manifest
from eagle3.errors import ConfigError, DataError
from eagle3.names import CaptureFormat, LastHidden, Regenerate, StatesDtype, TrainOn
from eagle3.verifier.base import CapturedStates, Sampling, VerifierDescription
from eagle3.verifier.huggingface import HuggingFaceVerifier
from eagle3.verifier.states import StatesOffer
from tests.capturing.worlds import (
    LAYERS,
    TALK,
    run,
    samples,
    settings,
    token_lines,
    write_lines,
)


@pytest.fixture(scope="module")
def verifier(chat_verifier: Path) -> HuggingFaceVerifier:
    return HuggingFaceVerifier(chat_verifier)


def states(verifier: HuggingFaceVerifier, ids: Tensor) -> Tensor:
    (found,) = verifier.capture([ids], LAYERS)
    return torch.cat([*found.aux, found.last], dim=-1)


def test_token_ids_become_shards(
    chat_verifier: Path, verifier: HuggingFaceVerifier, tmp_path: Path
) -> None:
    lines = token_lines(60)
    tokens = write_lines(tmp_path / "tokens.jsonl", lines)
    out = tmp_path / "out"
    found, said = run(settings(chat_verifier, out, tokens=str(tokens)))
    assert (found.documents, found.tokens) == (60, sum(len(line["ids"]) for line in lines))
    assert not found.failed
    for sample, line in zip(samples(out), lines, strict=True):
        assert sample.input_ids.tolist() == line["ids"]
        assert sample.loss_mask.tolist() == [n >= line["n"] for n in range(len(line["ids"]))]
        stored = torch.cat((sample.aux_hidden, sample.last_hidden), dim=-1)
        assert stored.dtype == torch.bfloat16
        expected = states(verifier, sample.input_ids)
        torch.testing.assert_close(stored.float(), expected, rtol=2**-7, atol=1e-4)
    manifest = read_manifest(out)
    assert len(manifest.shards) > 3
    assert manifest.states.aux_layer_ids == tuple(LAYERS)
    assert manifest.states.last_hidden is LastHidden.pre_norm
    assert manifest.verifier.tokenizer_fingerprint
    assert manifest.verifier.chat_template_fingerprint
    assert "60 documents" in said[0]
    assert "of disk free" in said[0]
    assert "GB (" in said[0] or "bytes" in said[0]
    assert "tokens/s, 0:00 left" in said[-1]
    record = json.loads((out / "capture.json").read_text())
    assert record["states"]["engine"] == "transformers"
    assert record["states"]["computed_in"] == "float32"
    assert record["answers"] is None


def test_conversations_keep_their_answers_and_prompts_get_one(
    chat_verifier: Path, verifier: HuggingFaceVerifier, tmp_path: Path
) -> None:
    prompts = write_lines(tmp_path / "talk.jsonl", TALK)
    out = tmp_path / "out"
    run(settings(chat_verifier, out, prompts=str(prompts)))
    template = ChatTemplate.load(chat_verifier)
    found = samples(out)
    conversations = read_conversations(prompts)
    for place in (2, 3):
        expected = masked_tokens(template, conversations[place])
        assert found[place].input_ids.tolist() == list(expected.ids)
        assert found[place].loss_mask.int().tolist() == list(expected.loss_mask)
    for place in (0, 1):
        prompt = template.ids(conversations[place], ask=True)
        ids = found[place].input_ids.tolist()
        assert ids[: len(prompt)] == prompt
        (answer,) = verifier.generate([torch.tensor(prompt)], Sampling(6))
        assert ids[len(prompt) :] == answer.tolist()
        assert found[place].loss_mask.tolist() == [n >= len(prompt) for n in range(len(ids))]
    record = json.loads((out / "capture.json").read_text())
    assert record["answers"]["max_new_tokens"] == 6
    assert record["answers"]["temperature"] == 0.0


def test_answers_can_all_be_written_anew(chat_verifier: Path, tmp_path: Path) -> None:
    """Each answers what the template makes of the turns before it, new ones included."""
    prompts = write_lines(tmp_path / "talk.jsonl", TALK[2:3])
    out = tmp_path / "out"
    run(settings(chat_verifier, out, prompts=str(prompts), answers={"regenerate": Regenerate.all}))
    (sample,) = samples(out)
    template = ChatTemplate.load(chat_verifier)
    text = template.decode(sample.input_ids.tolist())
    assert "Hello." not in text
    assert "Farewell" not in text
    assert text.count("<|im_start|>assistant\n") == 2
    runs = "".join("1" if gate else "0" for gate in sample.loss_mask.tolist()).strip("0")
    assert 1 <= len([run for run in runs.split("0") if run]) <= 2
    last = text.rindex("<|im_start|>assistant\n") + len("<|im_start|>assistant\n")
    prompt = len(template.tokenizer(text[:last], add_special_tokens=False)["input_ids"])
    assert sample.loss_mask[prompt:].all()


def test_sampled_answers_come_again_with_their_seed(chat_verifier: Path, tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "talk.jsonl", TALK[:2])

    def ids(name: str, seed: int) -> list[list[int]]:
        answers = {"temperature": 1.0, "seed": seed}
        run(settings(chat_verifier, tmp_path / name, prompts=str(prompts), answers=answers))
        return [sample.input_ids.tolist() for sample in samples(tmp_path / name)]

    first = ids("one", 1)
    assert ids("two", 1) == first
    assert ids("three", 2) != first


def test_batches_change_nothing_but_rounding(chat_verifier: Path, tmp_path: Path) -> None:
    tokens = write_lines(tmp_path / "tokens.jsonl", token_lines(30))
    found = []
    for batch_tokens in (1, 400):
        out = tmp_path / f"out{batch_tokens}"
        wide = {"stored_dtype": StatesDtype.float32, "batch_tokens": batch_tokens}
        run(settings(chat_verifier, out, tokens=str(tokens), **wide))
        found.append(samples(out))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.input_ids, other.input_ids)
        for name in ("aux_hidden", "last_hidden"):
            a, b = getattr(one, name), getattr(other, name)
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("train_on", "turns"), [(TrainOn.last_turn, 1), (TrainOn.assistant, 2), (TrainOn.all, 0)]
)
def test_which_turns_are_supervised(
    chat_verifier: Path, tmp_path: Path, train_on: TrainOn, turns: int
) -> None:
    prompts = write_lines(tmp_path / "talk.jsonl", TALK[2:3])
    run(settings(chat_verifier, tmp_path / "out", prompts=str(prompts), train_on=train_on))
    (sample,) = samples(tmp_path / "out")
    gates = sample.loss_mask.int()
    starts = int((gates[1:] > gates[:-1]).sum())
    if turns:
        assert starts == turns
    else:
        assert gates.all()


def test_what_cannot_be_used_is_listed(chat_verifier: Path, tmp_path: Path) -> None:
    lines = token_lines(6)
    lines[1] = {"ids": [5], "n": 0}
    lines[3] = {"ids": [7] * 90, "n": 3}
    lines[4] = {"ids": [3, 4, 5], "n": 3}
    tokens = write_lines(tmp_path / "tokens.jsonl", lines)
    wanted = settings(chat_verifier, tmp_path / "out", tokens=str(tokens), max_length=80)
    with pytest.raises(DataError, match="max_failed allows 0"):
        run(wanted)
    found, _ = run(replace(wanted, max_failed=3))
    assert found.documents == 3
    assert len(found.failed) == 3
    for said, part in zip(
        found.failed, ("1 tokens", "90 tokens, max_length allows 80", "nothing to supervise"),
        strict=True,
    ):  # fmt: skip
        assert part in said
    assert json.loads((tmp_path / "out" / "capture.json").read_text())["failed"] == [*found.failed]


def test_files_of_single_documents(chat_verifier: Path, tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "talk.jsonl", TALK)
    for name, shape in (("native", CaptureFormat.native), ("v1", CaptureFormat.v1)):
        run(settings(chat_verifier, tmp_path / name, prompts=str(prompts), format=shape))
    for place, sample in enumerate(samples(tmp_path / "native")):
        stored = torch.load(tmp_path / "v1" / f"data_{place}.pt", weights_only=True)
        assert torch.equal(stored["input_ids"], sample.input_ids)
        assert stored["loss_mask"].bool().tolist() == sample.loss_mask.tolist()
        *aux, last = stored["hidden_states"]
        torch.testing.assert_close(torch.cat(aux, -1), sample.aux_hidden, rtol=2**-6, atol=1e-3)
        torch.testing.assert_close(last, sample.last_hidden, rtol=2**-6, atol=1e-3)
    assert (tmp_path / "v1" / "data_config.json").exists()


def test_a_complete_directory_is_left_alone_and_another_capture_is_refused(
    chat_verifier: Path, tmp_path: Path
) -> None:
    tokens = write_lines(tmp_path / "tokens.jsonl", token_lines(9))
    wanted = settings(chat_verifier, tmp_path / "out", tokens=str(tokens))
    run(wanted)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    found, said = run(wanted)
    assert found.documents == 9
    assert "complete already" in said[-1]
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    with pytest.raises(DataError, match="found another capture"):
        run(replace(wanted, aux_layer_ids=[0, 1, 2]))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("do not lose this")
    with pytest.raises(DataError, match=r"thesis\.tex"):
        run(replace(wanted, out=str(tmp_path / "full")))


def test_a_forecast_needs_no_weights(chat_verifier: Path, tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "talk.jsonl", TALK)
    line = forecast(plan_capture(settings(chat_verifier, tmp_path / "o", prompts=str(prompts))))
    assert "4 documents, at most" in line
    assert not (tmp_path / "o").exists()


class ByOne:
    """A back end whose layers are one off, and which does not know it."""

    def __init__(self, verifier: HuggingFaceVerifier) -> None:
        self._verifier = verifier
        self.offer: StatesOffer = verifier.offer

    def describe(self) -> VerifierDescription:
        return self._verifier.describe()

    def capture(
        self, token_ids: Sequence[Tensor], aux_layer_ids: Sequence[int]
    ) -> list[CapturedStates]:
        return self._verifier.capture(token_ids, [k + 1 for k in aux_layer_ids])


def test_verify_captures_again_and_finds_a_layer_that_is_off(
    chat_verifier: Path, verifier: HuggingFaceVerifier, tmp_path: Path
) -> None:
    tokens = write_lines(tmp_path / "tokens.jsonl", token_lines(12))
    wanted = settings(chat_verifier, tmp_path / "out", tokens=str(tokens), verify_samples=4)
    run(wanted)
    said: list[str] = []
    found = verify(wanted, said.append)
    assert len(found) == 4
    assert max(max(each.distances) for each in found) < 0.005
    assert "the model's own in" in said[-1]
    shifted = replace(wanted, out=str(tmp_path / "shifted"))
    plan = plan_capture(shifted)
    documents = [item for item in plan.items if not isinstance(item, Conversation)]
    _fill(plan, ByOne(verifier), documents, BadSamples(0), said.append)
    with pytest.raises(DataError, match="entering 1 is") as caught:
        verify(shifted, said.append)
    assert "last is" not in str(caught.value)


def test_another_verifier_is_refused(chat_verifier: Path, tmp_path: Path) -> None:
    from tests.capturing.worlds import make_chat_verifier

    tokens = write_lines(tmp_path / "tokens.jsonl", token_lines(5))
    wanted = settings(chat_verifier, tmp_path / "out", tokens=str(tokens))
    run(wanted)
    other = make_chat_verifier(tmp_path / "other")
    model = HuggingFaceVerifier(other).model
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.save_pretrained(other)
    with pytest.raises(DataError, match="found other weights"):
        verify(replace(wanted, verifier=str(other)), print)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "expected one of them"),
    ({"prompts": "a", "tokens": "b"}, "expected one of them"),
    ({"tokens": "t", "aux_layer_ids": [3, 1]}, "expected ascending ids from 0 to 4"),
    ({"tokens": "t", "part": 2, "parts": 2}, "expected 0 to 1"),
    ({"tokens": "t", "device": "abacus"}, "expected auto, cpu"),
    ({"tokens": "t", "shard_gb": 0.0}, "expected more than 0"),
    ({"tokens": "t", "format": CaptureFormat.v1, "stored_dtype": StatesDtype.float32}, "bfloat16"),
]


@pytest.mark.parametrize(("changes", "said"), WRONG, ids=[str(n) for n in range(len(WRONG))])
def test_settings_that_cannot_be(
    chat_verifier: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    write_lines(tmp_path / "t", token_lines(3))
    if changes.get("tokens") == "t":
        changes = {**changes, "tokens": str(tmp_path / "t")}
    with pytest.raises(ConfigError, match=said):
        plan_capture(settings(chat_verifier, tmp_path / "out", **changes))
