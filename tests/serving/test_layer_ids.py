"""Ids that an engine must be told, against a second reading of the engine's rule."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from eagle3.errors import ConfigError
from eagle3.serving.independent_reader import captured_layers
from eagle3.serving.layer_ids import DEEPSEEK_CLASSES, check_entering, sglang_ids

KIMI, DEEPSEEK = "KimiK25ForConditionalGeneration", "DeepseekV3ForCausalLM"
LLAMA, GPT_OSS = "LlamaForCausalLM", "GptOssForCausalLM"
RELEASES = ((0, 5, 9), (0, 5, 12), (0, 5, 14), (0, 5, 18), (0, 5, 23))


@pytest.mark.parametrize(
    ("entering", "verifier", "oldest", "nested", "first", "last"),
    [
        pytest.param((2, 30, 58), KIMI, (0, 5, 14), (1, 29, 57), (0, 5, 14), None, id="kimi"),
        pytest.param((2, 30, 58), KIMI, (0, 5, 9), (1, 29, 57), (0, 5, 12), None, id="kimi-old"),
        pytest.param((2, 30, 58), DEEPSEEK, (0, 5, 9), (1, 29, 57), (0, 5, 9), None, id="all"),
        pytest.param(
            (3, 31, 59), DEEPSEEK, (0, 5, 14), (3, 31, 59), (0, 5, 14), None, id="v03-new"
        ),
        pytest.param(
            (3, 31, 59), DEEPSEEK, (0, 5, 9), (2, 30, 58), (0, 5, 9), (0, 5, 12), id="v03-old"
        ),
        pytest.param(
            (3, 31, 59), KIMI, (0, 5, 12), (2, 30, 58), (0, 5, 12), (0, 5, 12), id="v03-kimi"
        ),
        pytest.param((3, 31, 59), LLAMA, (0, 5, 9), (2, 30, 58), (0, 5, 9), None, id="llama"),
        pytest.param((1, 31, 61), GPT_OSS, (0, 5, 9), (1, 31, 61), (0, 5, 9), None, id="gpt-oss"),
        pytest.param((1, 31, 60), GPT_OSS, (0, 5, 9), (0, 30, 59), (0, 5, 9), None, id="gpt-oss+1"),
    ],
)
def test_ids_by_layers_class_and_release(
    entering: tuple[int, ...],
    verifier: str,
    oldest: tuple[int, ...],
    nested: tuple[int, ...],
    first: tuple[int, ...],
    last: tuple[int, ...] | None,
) -> None:
    found = sglang_ids(entering, verifier, 61, oldest)
    assert (found.ids, found.first, found.last) == (nested, first, last)


def test_where_no_single_file_serves_all_the_other_ids_are_said() -> None:
    (new,) = sglang_ids((3, 31, 59), DEEPSEEK, 61, (0, 5, 14)).notes
    (old,) = sglang_ids((3, 31, 59), DEEPSEEK, 61, (0, 5, 9)).notes
    assert "no single file serves all releases" in new
    assert "0.5.12" in new
    assert "[2, 30, 58]" in new
    assert "from 0.5.14 on" in old
    assert "[3, 31, 59]" in old


@pytest.mark.parametrize(
    ("entering", "verifier", "oldest", "said"),
    [
        pytest.param((1, 30, 58), KIMI, (0, 5, 14), "a first id of 1", id="first layer 1"),
        pytest.param((3, 31, 59), KIMI, (0, 5, 13), "not known", id="release between"),
        pytest.param((0, 31, 59), LLAMA, (0, 5, 14), "target=vllm", id="embeddings"),
        pytest.param((2, 31, 61), LLAMA, (0, 5, 14), "1..60", id="last state"),
    ],
)
def test_layers_that_sglang_cannot_be_told(
    entering: tuple[int, ...], verifier: str, oldest: tuple[int, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        sglang_ids(entering, verifier, 61, oldest)


def test_a_class_that_is_not_in_the_table_is_said() -> None:
    found = sglang_ids((2, 5, 8), "NewForCausalLM", 10, (0, 5, 14))
    assert found.ids == (1, 4, 7)
    assert "NewForCausalLM is not in the table" in found.notes[0]


@given(
    st.sets(st.integers(0, 12), min_size=1, max_size=4),
    st.sampled_from([LLAMA, GPT_OSS, "Qwen3ForCausalLM", *sorted(DEEPSEEK_CLASSES)]),
    st.sampled_from(RELEASES),
    st.sampled_from(RELEASES),
)
def test_every_release_that_is_promised_captures_what_was_trained(
    layers: set[int], verifier: str, oldest: tuple[int, ...], served: tuple[int, ...]
) -> None:
    entering = tuple(sorted(layers))
    try:
        found = sglang_ids(entering, verifier, 12, oldest)
    except ConfigError:
        return
    assume(found.first <= served and (found.last is None or served <= found.last))
    config = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(found.ids)}}
    assert captured_layers(config, "sglang", served, verifier, 12) == entering


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        pytest.param((), "without them an engine guesses", id="none"),
        pytest.param((2, 46, 91, 93), "as many as fc reads", id="last state too"),
        pytest.param((2, 46, 46), "ascending", id="twice"),
        pytest.param((2, 46, 95), "within 0..94", id="beyond"),
    ],
)
def test_ids_that_cannot_be_the_drafters(ids: tuple[int, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_entering(ids, 3, 94)
