"""Files of prompts and conversations, one a line.

=============  ===============================================================================
form           a line
=============  ===============================================================================
OpenAI         ``{"messages": [{"role": "user", "content": "..."}, ...], "tools": [...]}``
ShareGPT       ``{"conversations": [{"from": "human", "value": "..."}, ...]}``
prompt         ``{"prompt": "..."}``
plain text     the prompt itself, in a file that ends in ``.txt``
=============  ===============================================================================

The form is found line by line. ``source`` (also ``dataset``) labels a line of JSON. Content given
as parts (``[{"type": "text", "text": "..."}]``) is joined; pictures and sound are refused, because
the states of a document are captured from token ids alone.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle3.conversations.messages import Conversation, Message
from eagle3.errors import DataError

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "system": "system",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_FORMS = "'messages' (OpenAI), 'conversations' (ShareGPT) or 'prompt'"


def read_conversations(path: Path) -> tuple[Conversation, ...]:
    """All conversations of a ``.jsonl``, ``.jsonl.gz`` or ``.txt`` file, in its order.

    Empty lines are passed over.

    Raises:
        DataError: the file cannot be read or holds nothing, or a line is none of the forms.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            found = tuple(_conversations(lines, path))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}). Expected a .jsonl, .jsonl.gz or .txt file in UTF-8."
        ) from error
    if not found:
        raise DataError(f"{path}: holds no conversation. Expected one a line.")
    return found


def _conversations(lines: Any, path: Path) -> Iterator[Conversation]:
    plain = path.suffix == ".txt"
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text:
            continue
        place = f"{path}, line {number}"
        if plain:
            yield Conversation(({"role": "user", "content": text},), place=place)
        else:
            yield parse_line(text, place)


def parse_line(line: str, place: str) -> Conversation:
    """The conversation in a line of JSON; ``place`` says where it stands.

    Raises:
        DataError: it is none of the forms.
    """
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise DataError(
            f"{place}: not JSON ({error}). Expected an object with {_FORMS}."
        ) from error
    if not isinstance(fields, dict):
        raise DataError(f"{place}: found {fields!r:.60}, expected an object with {_FORMS}.")
    given = [key for key in ("messages", "conversations", "prompt") if key in fields]
    if len(given) != 1:
        found = " and ".join(given) or f"the keys {', '.join(sorted(map(str, fields))[:8])}"
        raise DataError(f"{place}: found {found}, expected exactly one of {_FORMS}.")
    messages = _messages(fields[given[0]], given[0], place)
    return Conversation(
        messages=messages,
        tools=_tools(fields.get("tools"), place),
        source=str(fields.get("source") or fields.get("dataset") or ""),
        place=place,
    )


def _messages(value: Any, key: str, place: str) -> tuple[Message, ...]:
    if key == "prompt":
        if not isinstance(value, str) or not value.strip():
            raise DataError(f"{place}: key 'prompt': found {value!r:.60}, expected some text.")
        return ({"role": "user", "content": value},)
    if not isinstance(value, list) or not value:
        raise DataError(f"{place}: key {key!r}: found {value!r:.60}, expected a list of messages.")
    read = _openai if key == "messages" else _sharegpt
    return tuple(
        read(message, f"{place}: message {number} of {key!r}")
        for number, message in enumerate(value)
    )


def _openai(message: Any, where: str) -> Message:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise DataError(
            f"{where}: found {message!r:.80}, expected an object with a role among "
            f"{', '.join(_ROLES)}."
        )
    kept = {key: value for key, value in message.items() if value is not None}
    kept["content"] = _text(message.get("content"), where)
    if not kept["content"] and message["role"] != "assistant" and "tool_calls" not in kept:
        raise DataError(f"{where}: found no content, expected some from {message['role']!r}.")
    return kept


def _sharegpt(message: Any, where: str) -> Message:
    role = SHAREGPT_ROLES.get(str(message.get("from"))) if isinstance(message, dict) else None
    if role is None:
        raise DataError(
            f"{where}: found {message!r:.80}, expected an object with 'from' among "
            f"{', '.join(SHAREGPT_ROLES)}."
        )
    return {"role": role, "content": _text(message.get("value"), where)}


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise DataError(
                f"{where}: found content of type {kind!r}, expected text: states are captured from "
                "token ids alone. Leave this conversation out."
            )
        texts.append(part["text"])
    return "".join(texts)


def _tools(value: Any, place: str) -> tuple[dict[str, Any], ...]:
    if value is None:
        return ()
    if isinstance(value, str):  # some data sets keep the list as JSON inside the JSON
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(f"{place}: key 'tools': expected a list of objects, as OpenAI's API takes.")
    return tuple(value)
