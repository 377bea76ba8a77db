"""What SGLang and vLLM say of their drafting, read over HTTP.

Both answer ``/v1/chat/completions``. Beside that:

* SGLang (``srt/managers/tokenizer_manager.py``, ``_calculate_spec_decoding_metrics``; read at
  0.5.23) says for each request how many verifier passes it took: ``spec_verify_ct`` in the
  ``meta_info`` that ``return_meta_info`` asks for, and a histogram of accepted drafts.
* vLLM (``v1/spec_decode/metrics.py``; read at 0.33.0) only counts for the whole server, in
  ``/metrics``: drafts, accepted tokens, and accepted tokens by position. Counters are read before
  and after, so nobody else may use the server meanwhile.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from eagle3.conversations.messages import Conversation
from eagle3.evaluation.config import ServerConfig
from eagle3.server_http import ServerError, get, get_json, post_json

_PROBE_TIMEOUT_S = 20.0
_METRIC = re.compile(r"^(vllm:spec_decode_\w+?)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class Answer:
    """One request."""

    tokens: int
    """Tokens of the answer."""
    seconds: float
    passes: int | None = None
    """Verifier passes; None: the engine does not say it by request, or does not draft."""
    accepted: tuple[int, ...] = ()
    """Passes in which 0, 1, 2... drafts were accepted; empty: not said."""


@dataclass(frozen=True)
class Counters:
    """Of a server since its start."""

    passes: float
    """Rounds of drafting, each followed by a verifier pass."""
    accepted: float
    """Accepted draft tokens."""
    by_position: tuple[float, ...]
    """Accepted draft tokens by position in the round."""

    def since(self, before: Counters) -> Counters:
        """What was added."""
        pairs = zip(self.by_position, before.by_position, strict=True)
        added = tuple(now - then for now, then in pairs)
        return Counters(self.passes - before.passes, self.accepted - before.accepted, added)


class Engine(Protocol):
    """A running server."""

    name: str
    """With its version."""

    def ask(self, conversation: Conversation, settings: ServerConfig) -> Answer:
        """One answer of the server to a conversation that ends with a user."""
        ...

    def counters(self) -> Counters | None:
        """None: this engine counts by request, or the server does not draft."""
        ...


def find_engine(url: str) -> Engine:
    """Ask a server which engine it is.

    Raises:
        ServerError: nobody answers, or neither SGLang nor vLLM does.
    """
    base = url.rstrip("/").removesuffix("/v1")
    try:
        info = get_json(f"{base}/server_info", _PROBE_TIMEOUT_S)
    except ServerError as error:
        no_sglang = error
    else:
        if isinstance(info, dict) and "internal_states" in info:
            return Sglang(base, f"SGLang {info.get('version', 'of unknown version')}")
        no_sglang = ServerError(f"{base}/server_info: not as SGLang answers")
    try:
        version = get_json(f"{base}/version", _PROBE_TIMEOUT_S)["version"]
    except (ServerError, KeyError, TypeError) as error:
        raise ServerError(
            f"{base}: found neither SGLang ({no_sglang}) nor vLLM ({error}), expected the address "
            "of one, such as http://localhost:30000"
        ) from error
    return Vllm(base, f"vLLM {version}")


class Sglang:
    """Counts verifier passes by request."""

    def __init__(self, url: str, name: str) -> None:
        self.url, self.name = url, name

    def ask(self, conversation: Conversation, settings: ServerConfig) -> Answer:
        reply, seconds = _chat(self.url, conversation, settings, {"return_meta_info": True})
        meta = _field(reply, ("choices", 0), self.url).get("meta_info") or {}
        passes = meta.get("spec_verify_ct")
        histogram = meta.get("spec_correct_drafts_histogram") or ()
        return Answer(
            tokens=int(_field(reply, ("usage", "completion_tokens"), self.url)),
            seconds=seconds,
            passes=int(passes) if passes else None,
            accepted=tuple(int(count) for count in histogram),
        )

    def counters(self) -> Counters | None:
        return None


class Vllm:
    """Counts for the whole server."""

    def __init__(self, url: str, name: str) -> None:
        self.url, self.name = url, name
        self._model: str | None = None

    def ask(self, conversation: Conversation, settings: ServerConfig) -> Answer:
        model = {"model": settings.model or self._served()}
        reply, seconds = _chat(self.url, conversation, settings, model)
        return Answer(int(_field(reply, ("usage", "completion_tokens"), self.url)), seconds)

    def counters(self) -> Counters | None:
        found = read_counters(get(f"{self.url}/metrics", _PROBE_TIMEOUT_S))
        if not any(name.startswith("vllm:spec_decode_num_drafts") for name, _, _ in found):
            return None
        positions: dict[int, float] = {}
        for name, labels, value in found:
            place = _POSITION.search(labels)
            if name.endswith("per_pos_total") and place:
                position = int(place[1])
                positions[position] = positions.get(position, 0.0) + value
        return Counters(
            passes=_total(found, "vllm:spec_decode_num_drafts_total"),
            accepted=_total(found, "vllm:spec_decode_num_accepted_tokens_total"),
            by_position=tuple(value for _, value in sorted(positions.items())),
        )

    def _served(self) -> str:
        if self._model is None:
            listed = get_json(f"{self.url}/v1/models", _PROBE_TIMEOUT_S)
            self._model = str(_field(listed, ("data", 0, "id"), self.url))
        return self._model


def read_counters(text: str) -> list[tuple[str, str, float]]:
    """Name, labels and value of the drafting counters in Prometheus' text form."""
    return [(name, labels or "", float(value)) for name, labels, value in _METRIC.findall(text)]


def _total(found: Sequence[tuple[str, str, float]], wanted: str) -> float:
    """Over the engines of a server."""
    return sum(value for name, _, value in found if name == wanted)


def _chat(
    url: str, conversation: Conversation, settings: ServerConfig, extra: dict[str, Any]
) -> tuple[Any, float]:
    content = {
        "messages": [dict(message) for message in conversation.messages],
        "max_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "model": settings.model or "default",
        **({"tools": [dict(tool) for tool in conversation.tools]} if conversation.tools else {}),
        **extra,
    }
    started = time.monotonic()
    reply = post_json(
        f"{url}/v1/chat/completions",
        content,
        timeout_s=settings.timeout_s,
        attempts=settings.attempts,
    )
    return reply, time.monotonic() - started


def _field(reply: Any, path: Sequence[str | int], url: str) -> Any:
    """A value inside a reply.

    Raises:
        ServerError: it is not there.
    """
    value = reply
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError) as error:
            raise ServerError(
                f"{url}: a reply without {'.'.join(map(str, path))}: {str(reply)[:120]}, expected "
                "the OpenAI form"
            ) from error
    if value is None:
        raise ServerError(f"{url}: found null as {'.'.join(map(str, path))} of a reply")
    return value
