"""Live decoding: what it measures agrees with what validation does, and differences are found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3.data.tokens import TokenDocument
from eagle3.errors import ConfigError, DataError
from eagle3.evaluation.config import LiveConfig
from eagle3.evaluation.live import (
    PLAIN,
    compare_with_generate,
    decode_by_turns,
    first_difference,
    replay_lengths,
    tolerance,
)
from eagle3.evaluation.live_inputs import LiveModels, document_prompts, file_prompts
from eagle3.evaluation.live_report import add_live, check_live, measure_live
from eagle3.evaluation.report import Report, _lengths, write
from tests.decoding.tiny import LAYERS, make_drafter, make_prompts, make_verifier
from tests.evaluation.live_world import make_live_world
from tests.evaluation.test_evaluate import evaluate, read
from tests.tiny_run import TinyWorld

LIVE = LiveConfig(draft_tokens=[2, 4], max_new_tokens=20, batch_size=3)


def quiet(_: str) -> None:
    """Nobody listens."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> LiveModels:
    verifier = make_verifier(tmp_path_factory.mktemp("verifier"), ends=(4,))
    return LiveModels(verifier, make_drafter(), LAYERS)


def test_live_lengths_are_those_of_a_replay(models: LiveModels) -> None:
    prompts = make_prompts([3, 9, 5, 14, 7])
    found, costs = decode_by_turns(models, prompts, LIVE, 5, quiet)
    answers = [found[PLAIN].answers[number] for number in range(len(prompts))]
    lengths = replay_lengths(models, prompts, answers, 5)
    for drafts in (2, 4):
        assert found[drafts].acceptance_length == pytest.approx(lengths[drafts - 1], abs=1e-12)
        assert found[drafts].tokens == found[PLAIN].tokens
    assert found[PLAIN].acceptance_length == 1.0
    assert lengths == sorted(lengths)
    assert lengths[-1] > 1.05
    assert len(costs.verifier_s) == 6


def test_a_changed_answer_is_found_and_named(models: LiveModels) -> None:
    prompts = make_prompts([4, 6])
    live = replace(LIVE, draft_tokens=[2])
    found, _ = decode_by_turns(models, prompts, live, 2, quiet)
    clean = compare_with_generate(models, prompts, found, live, quiet)
    assert (clean.same, clean.excused, clean.wrong) == (4, 0, ())
    answer = found[2].answers[1]
    other = (answer.ids[3] + 1) % 12
    found[2].answers[1] = replace(answer, ids=(*answer.ids[:3], other, *answer.ids[4:]))
    caught = compare_with_generate(models, prompts, found, live, quiet)
    assert (caught.same, caught.excused, len(caught.wrong)) == (3, 0, 1)
    assert "prompt 1, 2 drafts: token 3 is" in caught.wrong[0]
    report = Report("planted")
    add_live(report, measure_live(models, prompts, live, quiet), live)
    assert report.figures["live/lossless"] == 1.0


def test_a_tie_is_excused(tmp_path: Path) -> None:
    """Two words with one row of the head: which of them is said is for rounding to decide."""
    verifier = make_verifier(tmp_path)
    with torch.no_grad():
        verifier.model.lm_head.weight[8] = verifier.model.lm_head.weight[2]
    twins = {2: 8, 8: 2}
    models = LiveModels(verifier, make_drafter(), LAYERS)
    prompts = make_prompts([5] * 8)
    live = replace(LIVE, draft_tokens=[2])
    found, _ = decode_by_turns(models, prompts, live, 2, quiet)
    number, place = next(
        (number, place)
        for number in range(8)
        for place, token in enumerate(found[2].answers[number].ids)
        if token in twins
    )
    answer = found[2].answers[number]
    twin = twins[answer.ids[place]]
    found[2].answers[number] = replace(answer, ids=(*answer.ids[:place], twin))
    compared = compare_with_generate(models, prompts, found, live, quiet)
    assert (compared.excused, compared.wrong) == (1, ())


def test_replayed_and_live_lengths_are_bars_of_their_own() -> None:
    report = Report(
        "a drafter", {"val/acceptance_replay": 1.5, "live/acceptance_replay": 1.75, "val/loss": 2.0}
    )
    assert _lengths(report) == {"acceptance_replay": 1.5, "live/acceptance_replay": 1.75}


def test_first_difference_and_tolerance() -> None:
    assert first_difference((1, 2, 3), (1, 5, 3)) == 1
    assert first_difference((1, 2), (1, 2, 3)) == 2
    assert tolerance(torch.float32, 30.0) == 1e-4
    assert tolerance(torch.bfloat16, 16.0) == pytest.approx(0.5)


def test_sampled_answers_are_measured_without_a_comparison(
    models: LiveModels, tmp_path: Path
) -> None:
    live = replace(LIVE, temperature=0.8, top_p=0.9)
    report = Report("sampled")
    add_live(report, measure_live(models, make_prompts([5, 6, 7, 8]), live, quiet), live)
    assert "live/lossless" not in report.figures
    assert "live/acceptance_replay" not in report.figures
    assert 1.0 < report.figures["live/acceptance_length"] < 3.0
    assert len(report.lengths) == 4
    write(report, tmp_path)
    assert json.loads((tmp_path / "evaluation.json").read_text())["tables"]


def test_prompts_of_every_form(tmp_path: Path, models: LiveModels) -> None:
    tokens = tmp_path / "tokens.jsonl"
    lines = [{"ids": [n, 2, 3, 4, 5], "n": 3} for n in range(6)]
    tokens.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = file_prompts(tokens, tmp_path, LiveConfig(num_prompts=3))
    assert [len(prompt) for prompt in found] == [3, 3, 3]
    assert len({int(prompt[0]) for prompt in found}) == 3
    documents = [
        TokenDocument([1, 2, 3, 4, 5], [False, False, True, False, True]),
        TokenDocument([1, 2, 3], [False, False, False]),
        TokenDocument([1, 2, 3], [True, True, True]),
    ]
    assert [p.tolist() for p in document_prompts(documents, LiveConfig(held_out=1))] == [[1, 2]]
    with pytest.raises(DataError, match="found 1 held-out documents with a prompt"):
        document_prompts(documents, LiveConfig(held_out=2))


def test_what_cannot_be_measured_is_refused() -> None:
    wrong = LiveConfig(
        draft_tokens=[0], max_new_tokens=1, batch_size=0, top_p=0.0, temperature=-1.0, top_k=-1
    )
    with pytest.raises(ConfigError) as caught:
        check_live(wrong)
    for key in ("draft_tokens", "max_new_tokens", "batch_size", "top_p", "temperature", "top_k"):
        assert f"live.{key}=" in str(caught.value)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    """A tiny run on what its verifier says."""
    world = make_live_world(tmp_path_factory.mktemp("world"), 40)
    world.run("epochs=3", "max_seq_len=32", "data.val_ratio=0.3", "val.draft_steps=2")
    return world


def test_held_out_documents_are_decoded_as_validation_walks_them(
    world: TinyWorld, tmp_path: Path
) -> None:
    """Every held-out answer is the verifier's own, so live and validation give one figure."""
    (run,) = world.run_folders()
    best = run / "checkpoints" / "best.ckpt"
    held_out = len((run / "validation_samples.txt").read_text().split())
    done = evaluate(
        tmp_path,
        f"ckpt={best}",
        f"live.held_out={held_out}",
        "live.draft_tokens=[2,1]",
        "live.max_new_tokens=12",
        "live.batch_size=4",
        "speed.baseline_tok_s=90",
        f"out={tmp_path}",
    )
    content = read(tmp_path)
    found = content["figures"]
    assert found["live/lossless"] == 1.0
    assert found["live/acceptance_length"] == pytest.approx(found["val/acceptance_replay"])
    assert found["live/acceptance_replay"] == pytest.approx(found["val/acceptance_replay"])
    rounds = content["by_position"]
    assert rounds["live rounds"] == pytest.approx(rounds["held-out rounds"])
    assert {"By number of drafts", "Where the time goes"} < set(content["tables"])
    assert len(content["tables"]["By number of drafts"]) == 7
    assert "Predicted for a server at 90 tok/s" in done.stdout
    assert "decoding: " in done.stdout
    assert found["live/speedup_predicted"] > 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["live/acceptance_length"] == pytest.approx(found["live/acceptance_length"])


def test_prompts_need_no_shards(world: TinyWorld, tmp_path: Path) -> None:
    (run,) = world.run_folders()
    tokens = tmp_path / "prompts.jsonl"
    tokens.write_text('{"ids": [1, 2, 3], "n": 3}\n{"ids": [4, 5, 6, 7], "n": 4}\n')
    evaluate(
        tmp_path,
        f"ckpt={run / 'checkpoints' / 'best.ckpt'}",
        f"prompts={tokens}",
        "paths.shards=/nowhere",
        "live.max_new_tokens=10",
        f"out={tmp_path}",
    )
    found = read(tmp_path)["figures"]
    assert found["live/lossless"] == 1.0
    assert not any(name.startswith("val/") for name in found)


def test_speed_alone_needs_no_drafter(tmp_path: Path) -> None:
    done = evaluate(
        tmp_path,
        "speed.baseline_tok_s=90",
        "speed.acceptance=[0.7,0.5]",
        "speed.drafter_ms=1",
        f"out={tmp_path}",
    )
    found = read(tmp_path)["figures"]
    # 11.1 ms a pass: 2.2 tokens in 13.1 ms with two drafts, 1.7 in 12.1 ms with one
    assert found["predicted/draft_tokens"] == 2
    assert found["predicted/tokens_per_s"] == pytest.approx(2.2 / (1 / 90 + 0.002))
    assert "the best a server can do" in done.stdout
