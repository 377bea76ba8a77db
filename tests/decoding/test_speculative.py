"""Drafting changes nothing but the number of passes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eagle3.data.vocab import VocabMap
from eagle3.decoding.clock import Clock
from eagle3.decoding.huggingface import HuggingFaceDecoding
from eagle3.decoding.speculative import Answer, Drafting, decode, decode_all
from eagle3.errors import VerifierError
from eagle3.model.drafter import Drafter
from eagle3.names import DecodingPart
from eagle3.verifier.base import Sampling
from eagle3.verifier.huggingface import HuggingFaceVerifier
from tests.decoding.tiny import CONFIG, LAYERS, WORDS, make_drafter, make_prompts, make_verifier
from tests.helpers import Document
from tests.server import decode_greedily

CPU = torch.device("cpu")
LENGTHS = (1, 2, 9, 5, 17, 3, 30, 8)


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceVerifier:
    return make_verifier(tmp_path_factory.mktemp("verifier"), ends=(4, 7))


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceVerifier:
    return make_verifier(tmp_path_factory.mktemp("endless"))


def answers(
    verifier: HuggingFaceVerifier,
    prompts: list[Tensor],
    sampling: Sampling,
    drafts: int,
    batch_size: int = 8,
    drafter: Drafter | None = None,
) -> list[Answer]:
    drafting = Drafting(drafter or make_drafter(), drafts) if drafts else None
    decoding = HuggingFaceDecoding(verifier, LAYERS if drafts else ())
    return decode_all(
        decoding, prompts, sampling, Clock(CPU), drafting, batch_size=batch_size
    )  # fmt: skip


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("drafts", [0, 1, 3, 6])
def test_greedy_answers_are_those_of_the_verifier_alone(
    verifier: HuggingFaceVerifier, drafts: int, batch_size: int
) -> None:
    prompts = make_prompts(LENGTHS)
    for limit in (1, 2, 23):
        wanted = [verifier.generate([p], Sampling(limit))[0].tolist() for p in prompts]
        found = answers(verifier, prompts, Sampling(limit), drafts, batch_size)
        assert [list(answer.ids) for answer in found] == wanted
        ended = {ids[-1] in (4, 7) for ids in wanted if len(ids) < limit}
        assert ended <= {True}


def test_some_drafts_are_accepted_and_some_answers_end_early(
    verifier: HuggingFaceVerifier,
) -> None:
    """Else the tests here would prove nothing."""
    found = answers(verifier, make_prompts(LENGTHS), Sampling(23), 3)
    rounds = sum(answer.rounds for answer in found)
    first, second, third = (sum(a.accepted[k] for a in found) for k in range(3))
    assert rounds / 20 < third <= second <= first < rounds
    assert 1 <= sum(len(answer.ids) < 23 for answer in found) < len(found)


@pytest.mark.parametrize("drafts", [1, 2, 4])
def test_counts_are_those_of_a_round_by_round_walk(
    endless: HuggingFaceVerifier, drafts: int
) -> None:
    """Tokens and rounds equal those of a drafter fed token by token with the captured states."""
    drafter, prompts = make_drafter(), make_prompts(LENGTHS)
    vocab = VocabMap(drafter.d2t, drafter.t2d)
    for prompt, answer in zip(
        prompts, answers(endless, prompts, Sampling(25), drafts), strict=True
    ):
        ids = torch.cat((prompt, torch.tensor(answer.ids)))
        (states,) = endless.capture([ids], LAYERS)
        gates = torch.arange(len(ids)) >= len(prompt)
        document = Document(ids, gates, torch.cat(states.aux, dim=-1), states.last)
        emitted, rounds = decode_greedily(drafter, vocab, document, drafts)
        assert (answer.emitted, answer.rounds) == (emitted, rounds)
        assert answer.emitted <= answer.rounds + sum(answer.accepted)


def test_the_whole_vocabulary_may_be_drafted(verifier: HuggingFaceVerifier) -> None:
    config = replace(CONFIG, draft_vocab_size=WORDS)
    prompts = make_prompts(LENGTHS)
    wanted = answers(verifier, prompts, Sampling(12), 0)
    found = answers(verifier, prompts, Sampling(12), 3, drafter=make_drafter(config))
    assert [a.ids for a in found] == [a.ids for a in wanted]


@pytest.mark.parametrize("drafts", [1, 3])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(3, temperature=1.0), Sampling(3, temperature=0.6, top_p=0.9, top_k=7)],
    ids=["temperature", "top_p and top_k"],
)
def test_sampled_answers_have_the_verifiers_distribution(
    endless: HuggingFaceVerifier, drafts: int, sampling: Sampling
) -> None:
    """Against all 12^3 answers, counted exactly; a draft vocabulary without three of the words."""
    from tests.decoding.exact import chi_square_limit, exact_distribution

    prompt, copies = make_prompts([6], seed=5)[0], 6000
    drafting = Drafting(make_drafter(), drafts)
    found = decode(
        HuggingFaceDecoding(endless, LAYERS),
        [prompt] * copies,
        replace(sampling, seed=11),
        Clock(CPU),
        drafting,
    )
    counts = dict.fromkeys(itertools.product(range(WORDS), repeat=3), 0)
    for answer in found:
        counts[answer.ids] += 1  # type: ignore[index]
    expected = exact_distribution(endless, prompt, sampling)
    impossible = [ids for ids, count in counts.items() if count and expected[ids] == 0]
    assert not impossible
    statistic, freedom = 0.0, -1
    rare_expected = rare_found = 0.0
    for ids, probability in expected.items():
        if probability * copies >= 5:
            statistic += (counts[ids] - probability * copies) ** 2 / (probability * copies)
            freedom += 1
        else:
            rare_expected += probability * copies
            rare_found += counts[ids]
    if rare_expected >= 5:
        statistic += (rare_found - rare_expected) ** 2 / rare_expected
        freedom += 1
    assert freedom >= 10
    assert statistic < chi_square_limit(freedom)
    taken = sum(answer.accepted[0] for answer in found)
    assert 0.1 * copies < taken < 0.95 * sum(answer.rounds for answer in found)


def test_a_sampled_answer_does_not_depend_on_its_batch(verifier: HuggingFaceVerifier) -> None:
    prompts, sampling = make_prompts(LENGTHS), Sampling(15, temperature=0.9, seed=2)
    together = answers(verifier, prompts, sampling, 3, batch_size=8)
    alone = answers(verifier, prompts, sampling, 3, batch_size=1)
    assert [a.ids for a in together] == [a.ids for a in alone]
    other = answers(verifier, prompts, replace(sampling, seed=3), 3)
    assert [a.ids for a in together] != [a.ids for a in other]


def test_every_part_has_its_time(verifier: HuggingFaceVerifier) -> None:
    clock = Clock(CPU)
    drafting = Drafting(make_drafter(), 2)
    decode(
        HuggingFaceDecoding(verifier, LAYERS), make_prompts([4]), Sampling(9), clock, drafting
    )  # fmt: skip
    assert set(clock.seconds) == set(DecodingPart)
    assert clock.total == pytest.approx(sum(clock.seconds.values()))
    assert min(clock.seconds.values()) > 0


def test_a_prompt_without_room_is_refused(verifier: HuggingFaceVerifier) -> None:
    with pytest.raises(VerifierError, match=r"120 tokens and 13 to follow.*at most 128"):
        answers(verifier, make_prompts([120]), Sampling(10), 3)


def test_layers_that_forget_are_refused(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=WORDS,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=2,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(VerifierError, match="sliding_attention, expected full attention"):
        HuggingFaceDecoding(HuggingFaceVerifier(tmp_path))
