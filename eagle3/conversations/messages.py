"""One conversation, whatever form it was written in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

Message = Mapping[str, Any]
"""A message as chat templates take it: ``role``, ``content``, and what else a role has
(``tool_calls``, ``tool_call_id``, ``reasoning_content``, ``name``)."""

ASSISTANT = "assistant"


@dataclass(frozen=True)
class Conversation:
    """Messages in order, and where they come from."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """Descriptions of functions, as a chat template lists them."""
    source: str = ""
    """Label under which metrics are shown; empty: none given."""
    place: str = ""
    """File and line, for messages to people."""

    @property
    def answers(self) -> tuple[int, ...]:
        """Places of the assistant's messages."""
        return tuple(
            place for place, message in enumerate(self.messages) if message["role"] == ASSISTANT
        )

    def until(self, count: int) -> Conversation:
        """The first ``count`` messages."""
        return replace(self, messages=self.messages[:count])

    def up_to_last_answer(self) -> Conversation:
        """Without messages that nobody answered; empty where there is no answer."""
        return self.until(self.answers[-1] + 1 if self.answers else 0)

    def with_answer(self, content: str) -> Conversation:
        """One more message, by the assistant."""
        answer = {"role": ASSISTANT, "content": content}
        return replace(self, messages=(*self.messages, answer))
