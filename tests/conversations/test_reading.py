"""Files of conversations: every form, and what is said about lines that are none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from eagle3.conversations.messages import Conversation
from eagle3.conversations.reading import parse_line, read_conversations
from eagle3.errors import DataError

ASKED = {"role": "user", "content": "Hi"}
ANSWERED = {"role": "assistant", "content": "Hello"}


def write(path: Path, *lines: Any) -> Path:
    text = "".join(json.dumps(line) + "\n\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.jsonl.gz"])
def test_every_form_of_a_line(tmp_path: Path, name: str) -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    path = write(
        tmp_path / name,
        {"messages": [ASKED, ANSWERED], "source": "a", "tools": [{"name": "f"}]},
        {"messages": [{"role": "user", "content": parts, "name": None}, ANSWERED]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"prompt": "Hi", "dataset": "b"},
    )
    first, second, third, fourth = read_conversations(path)
    assert first.messages == second.messages == third.messages == (ASKED, ANSWERED)
    assert fourth.messages == (ASKED,)
    assert [each.source for each in (first, second, third, fourth)] == ["a", "", "", "b"]
    assert first.tools == ({"name": "f"},)
    assert third.place == f"{path}, line 5"  # empty lines count


def test_plain_text_is_one_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("Hi\n\n  Write {json}.\n")
    assert [each.messages[0]["content"] for each in read_conversations(path)] == [
        "Hi",
        "Write {json}.",
    ]


def test_tool_calls_are_kept_with_empty_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    found = parse_line(json.dumps({"messages": [ASKED, call]}), "here")
    assert found.messages[1] == {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        pytest.param("{", ["not JSON"], id="not json"),
        pytest.param("[1]", ["found [1]", "'messages' (OpenAI)"], id="a list"),
        pytest.param('{"text": "Hi"}', ["the keys text"], id="no form"),
        pytest.param(
            '{"prompt": "a", "messages": []}', ["found messages and prompt"], id="two forms"
        ),
        pytest.param('{"prompt": " "}', ["'prompt'", "expected some text"], id="empty prompt"),
        pytest.param('{"messages": []}', ["found []", "list of messages"], id="no messages"),
        pytest.param(
            '{"messages": [{"role": "bot", "content": "x"}]}', ["message 0", "bot"], id="odd role"
        ),
        pytest.param(
            '{"messages": [{"role": "user", "content": ""}]}', ["no content"], id="silent user"
        ),
        pytest.param(
            '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            ["'image_url'", "expected text"],
            id="a picture",
        ),
        pytest.param(
            '{"conversations": [{"from": "martian", "value": "x"}]}', ["martian"], id="odd speaker"
        ),
        pytest.param('{"prompt": "x", "tools": "f"}', ["'tools'"], id="tools that are none"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(line: str, said: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        parse_line(line, "chats.jsonl, line 3")
    for part in ["chats.jsonl, line 3", *said]:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param(None, "cannot be read", id="missing"),
        pytest.param(b"\xff\xfe", "cannot be read", id="not text"),
        pytest.param(b"\n \n", "holds no conversation", id="empty"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    path = tmp_path / "chats.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=said):
        read_conversations(path)


def test_only_what_an_answer_follows_is_kept() -> None:
    conversation = Conversation((ASKED, ANSWERED, ASKED))
    assert conversation.up_to_last_answer().messages == (ASKED, ANSWERED)
    assert Conversation((ASKED,)).up_to_last_answer().messages == ()
    assert Conversation((ASKED,)).with_answer("Hello").messages == (ASKED, ANSWERED)
