"""Supervised tokens of every kind of chat template, against truth written by hand.

In the expected text ⟦ and ⟧ stand around what is supervised.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.conversations.masking import MaskedTokens, masked_tokens
from eagle3.conversations.messages import Conversation
from eagle3.conversations.template import ChatTemplate
from eagle3.errors import DataError, VerifierError
from tests.conversations import templates
from tests.conversations.templates import Kind, chat_template

CHAT = (
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "So long."},
)
THOUGHT: tuple[dict[str, Any], ...] = (
    CHAT[0],
    {"role": "assistant", "content": "Hello!", "reasoning_content": "greet"},
    CHAT[2],
    {"role": "assistant", "content": "So long.", "reasoning_content": "part"},
)
CALLS: tuple[dict[str, Any], ...] = (
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "rain"}}]},
    {"role": "tool", "content": "yes"},
    {"role": "assistant", "content": "It rains."},
)
SYSTEM = {"role": "system", "content": "Sing."}

TRUTH = {
    "chatml, a default system message": (
        Kind(templates.CHATML),
        CHAT,
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n⟦Hello!<|im_end|>⟧\n<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n⟦So long.<|im_end|>⟧\n",
    ),
    "chatml, its own system message": (
        Kind(templates.CHATML),
        (SYSTEM, *CHAT[:2]),
        "<|im_start|>system\nSing.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n⟦Hello!<|im_end|>⟧\n",
    ),
    "system inside the first user message, bos each turn": (
        Kind(templates.LLAMA2, "</s>"),
        (SYSTEM, *CHAT),
        "<s>[INST] <<SYS>>Sing.<</SYS>>Hi [/INST]⟦ Hello! </s>⟧"
        "<s>[INST] Bye [/INST]⟦ So long. </s>⟧",
    ),
    "headers and one bos": (
        Kind(templates.LLAMA3, "<|eot|>"),
        CHAT,
        "<s><|start|>user<|end|>\n\nHi<|eot|><|start|>assistant<|end|>\n\n⟦Hello!<|eot|>⟧"
        "<|start|>user<|end|>\n\nBye<|eot|><|start|>assistant<|end|>\n\n⟦So long.<|eot|>⟧",
    ),
    "the template's own marks": (
        Kind(templates.MARKED),
        CHAT,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello!<|im_end|>⟧\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n⟦So long.<|im_end|>⟧\n",
    ),
    "reasoning dropped from earlier answers": (
        Kind(templates.THINKING),
        THOUGHT,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
        "⟦<think>\npart\n</think>\n\nSo long.<|im_end|>⟧\n",
    ),
    "tools and their answers": (
        Kind(templates.TOOLS),
        CALLS,
        '<|im_start|>system\nTools: [{"name": "rain"}]<|im_end|>\n'
        "<|im_start|>user\nRain?<|im_end|>\n<|im_start|>assistant\n"
        '⟦<call>{"name": "rain"}</call><|im_end|>⟧\n<|im_start|>tool\nyes<|im_end|>\n'
        "<|im_start|>assistant\n⟦It rains.<|im_end|>⟧\n",
    ),
    "no generation prompt, so the header is the answer's": (
        Kind(templates.NO_GENERATION_PROMPT, "</s>"),
        CHAT,
        "Q: Hi</s>\n⟦A: Hello!</s>⟧\nQ: Bye</s>\n⟦A: So long.</s>⟧\n",
    ),
    "no end-of-sequence token": (
        Kind(templates.NO_END, "</s>"),
        CHAT,
        "User: Hi\n\nBot: ⟦Hello!\n\n⟧User: Bye\n\nBot: ⟦So long.\n\n⟧",
    ),
    "no system messages allowed, none given": (
        Kind(templates.STRICT, "</s>"),
        CHAT[:2],
        "<|user|>Hi</s><|assistant|>⟦Hello!</s>⟧",
    ),
}


def conversation(messages: tuple[dict[str, Any], ...]) -> Conversation:
    tools = ({"name": "rain"},) if messages is CALLS else ()
    return Conversation(messages, tools, place="chats.jsonl, line 7")


def bracketed(template: ChatTemplate, tokens: MaskedTokens) -> str:
    parts, done = [], 0
    for start, stop in tokens.spans:
        parts += [list(tokens.ids[done:start]), list(tokens.ids[start:stop])]
        done = stop
    texts = [template.decode(part) for part in (*parts, list(tokens.ids[done:]))]
    return "".join(text if place % 2 == 0 else f"⟦{text}⟧" for place, text in enumerate(texts))


@pytest.mark.parametrize("name", TRUTH)
def test_what_is_supervised(name: str) -> None:
    kind, messages, expected = TRUTH[name]
    template = chat_template(kind)
    tokens = masked_tokens(template, conversation(messages))
    assert bracketed(template, tokens) == expected
    assert sum(tokens.loss_mask) == sum(stop - start for start, stop in tokens.spans)
    assert len(tokens.loss_mask) == len(tokens.ids)


def test_answers_that_the_template_rewrote_are_counted() -> None:
    tokens = masked_tokens(chat_template(Kind(templates.THINKING)), conversation(THOUGHT))
    assert tokens.num_rewritten == 1


def test_messages_after_the_last_answer_are_left_out() -> None:
    template = chat_template(Kind(templates.CHATML))
    assert masked_tokens(template, conversation(CHAT[:3])) == masked_tokens(
        template, conversation(CHAT[:2])
    )


@pytest.mark.parametrize(
    ("kind", "messages", "said"),
    [
        pytest.param(
            Kind(templates.FORCED_THINKING, "</s>"),
            (CHAT[0], {"role": "assistant", "content": "<think>greet</think>Hello!"}),
            ["cannot be told from its prompt", "<think>", "capture.regenerate"],
            id="the prompt opens a thought that the answer has not",
        ),
        pytest.param(
            Kind(templates.COUNTING, "</s>"),
            (
                *CHAT[:3],
                {"role": "assistant", "content": "x"},
                {"role": "assistant", "content": "y"},
            ),
            ["cannot be told from its prompt", "toy"],
            id="earlier turns depend on later ones",
        ),
        pytest.param(
            Kind(templates.SHOUTING, "</s>"),
            CHAT[:2],
            ["HELLO!", "'Hello!'", "changes what the assistant said"],
            id="the answer is changed",
        ),
        pytest.param(
            Kind(templates.STRICT, "</s>"),
            (SYSTEM, *CHAT[:2]),
            ["refuses it", "no system messages"],
            id="the template refuses",
        ),
        pytest.param(
            Kind(templates.MARKED.replace("m.content }}<|im_end|>{% endg", "'' }}{% endg")),
            CHAT,
            ["marks 0 answers", "expected 2"],
            id="marks that enclose nothing",
        ),
        pytest.param(
            Kind(templates.CHATML),
            CHAT[:1],
            ["no message of the assistant"],
            id="no answer",
        ),
        pytest.param(
            Kind(templates.CHATML),
            CHAT[1:],
            ["begins with a message of the assistant"],
            id="an answer to nothing",
        ),
    ],
)
def test_what_cannot_be_masked_safely_is_refused_with_the_reason(
    kind: Kind, messages: tuple[dict[str, Any], ...], said: list[str]
) -> None:
    with pytest.raises(DataError) as caught:
        masked_tokens(chat_template(kind), conversation(messages))
    for part in ["chats.jsonl, line 7", *said]:
        assert part in str(caught.value)


def test_a_tokenizer_without_a_template_is_refused() -> None:
    with pytest.raises(VerifierError, match="no chat template"):
        chat_template(Kind(""))


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="<>"), min_size=1, max_size=20)


@given(st.lists(TEXT.filter(lambda text: text.strip() == text), min_size=2, max_size=8))
def test_any_text_in_any_number_of_turns(texts: list[str]) -> None:
    """The supervised tokens are the answers with their end, whatever they say."""
    roles = ("user", "assistant")
    messages = tuple(
        {"role": roles[place % 2], "content": text} for place, text in enumerate(texts)
    )
    template = chat_template(Kind(templates.CHATML))
    tokens = masked_tokens(template, Conversation(messages))
    found = [template.decode(list(tokens.ids[start:stop])) for start, stop in tokens.spans]
    assert found == [f"{text}<|im_end|>" for text in texts[1::2]]
