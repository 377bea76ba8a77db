"""The verifier's chat template, as its tokenizer renders it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eagle3.conversations.messages import Conversation
from eagle3.errors import DataError, VerifierError
from eagle3.verifier.base import require_extra

_GENERATION_BLOCK = "{% generation"
_GENERATION_BLOCK_TRIMMED = "{%- generation"


class ChatTemplate:
    """Renders conversations to token ids, exactly as a server does before it generates.

    The template writes every special token itself, so none is added by the tokenizer (a second
    beginning-of-sequence token is a well-known way to lose quality in silence).
    """

    def __init__(self, tokenizer: Any, name: str, end_ids: frozenset[int] = frozenset()) -> None:
        """Wrap a transformers tokenizer.

        Args:
            tokenizer: With a chat template.
            name: Of the verifier, for messages.
            end_ids: Tokens that end an answer, beside the tokenizer's own end-of-sequence token.

        Raises:
            VerifierError: the tokenizer has no chat template.
        """
        if not tokenizer.chat_template:
            raise VerifierError(
                f"{name}: its tokenizer has no chat template, so nobody can say how a conversation "
                "becomes tokens. Expected chat_template.jinja, or chat_template in "
                "tokenizer_config.json. Give token ids instead of conversations, or add it."
            )
        self.tokenizer, self.name = tokenizer, name
        own = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
        self.end_ids = frozenset(own) | end_ids

    @classmethod
    def load(cls, directory: Path) -> ChatTemplate:
        """The template of a verifier's directory. No code from it is run.

        Raises:
            VerifierError: transformers is missing, or the tokenizer needs code of its own.
        """
        require_extra("transformers")
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # transformers raises whatever its many readers raise
            raise VerifierError(
                f"{directory}: its tokenizer cannot be loaded ({error}). Expected tokenizer.json; "
                "a tokenizer that comes as Python code is not run. Let the server render and "
                "tokenize, or give a file of token ids."
            ) from error
        return cls(tokenizer, directory.resolve().name, _generation_ends(directory))

    @property
    def marks_answers(self) -> bool:
        """Whether the template itself says which tokens the assistant wrote."""
        text = str(self.tokenizer.chat_template)
        marked = _GENERATION_BLOCK in text or _GENERATION_BLOCK_TRIMMED in text
        return marked and bool(self.tokenizer.is_fast)

    def ids(self, conversation: Conversation, *, ask: bool = False) -> list[int]:
        """Token ids; ``ask``: with the header of the answer that is to be generated.

        Raises:
            DataError: the template refuses the conversation, with its reason.
        """
        return list(self._render(conversation, add_generation_prompt=ask)["input_ids"])

    def own_mask(self, conversation: Conversation) -> list[bool]:
        """The template's own mask of the tokens that the assistant wrote."""
        rendered = self._render(conversation, return_assistant_tokens_mask=True)
        return [bool(flag) for flag in rendered["assistant_masks"]]

    def decode(self, ids: list[int]) -> str:
        """Text of token ids, special tokens included."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def _render(self, conversation: Conversation, **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                [dict(message) for message in conversation.messages],
                tools=[dict(tool) for tool in conversation.tools] or None,
                tokenize=True,
                return_dict=True,
                **options,
            )
        except Exception as error:  # a template raises jinja2's errors, or what its code raises
            raise DataError(
                f"{conversation.place or 'conversation'}: the chat template of {self.name} refuses "
                f"it ({error}). Leave it out, or bring it into the form that the template expects."
            ) from error


def _generation_ends(directory: Path) -> frozenset[int]:
    """End-of-sequence ids of ``generation_config.json``; a model may have several."""
    path = directory / "generation_config.json"
    if not path.exists():
        return frozenset()
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError) as error:
        raise VerifierError(f"{path}: cannot be read ({error}). Expected JSON.") from error
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)
