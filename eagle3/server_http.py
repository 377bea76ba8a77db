"""JSON over HTTP to a server that may be slow, restarting or wrong."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from typing import Any

from eagle3.errors import UserError

_PAUSE_S = 0.5
"""Before a second try; doubled each time."""
_WORTH_ANOTHER_TRY = (None, 408, 409, 425, 429, 500, 502, 503, 504)


class ServerError(UserError):
    """A server does not answer, or not as its engine does."""

    @property
    def status(self) -> int | None:
        """Of a reply other than 200; null: there was none, or it was not understood."""
        cause = self.__cause__
        return cause.code if isinstance(cause, urllib.error.HTTPError) else None


def get(url: str, timeout_s: float) -> str:
    """The body of a GET request, one try.

    Raises:
        ServerError: no answer in time, or a status other than 200.
    """
    return _once(urllib.request.Request(url), timeout_s)


def get_json(url: str, timeout_s: float) -> Any:
    """:func:`get`, read as JSON."""
    return _parse(get(url, timeout_s), url)


def post_json(url: str, content: dict[str, Any], *, timeout_s: float, attempts: int) -> Any:
    """Send ``content`` and read the reply, again after errors that may pass.

    Raises:
        ServerError: the last of ``attempts`` failed, or the server refuses what was sent.
    """
    body = json.dumps(content).encode()
    headers = {"Content-Type": "application/json"}
    for attempt in range(1, attempts + 1):
        request = urllib.request.Request(url, body, headers)
        try:
            return _parse(_once(request, timeout_s), url)
        except ServerError as error:
            if attempt == attempts or error.status not in _WORTH_ANOTHER_TRY:
                raise
            time.sleep(_PAUSE_S * 2 ** (attempt - 1))
    raise AssertionError("attempts is at least 1")


def _once(request: urllib.request.Request, timeout_s: float) -> str:
    url = request.full_url
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as reply:
            text: str = reply.read().decode()
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace").strip()
        raise ServerError(
            f"{url}: status {error.code} ({said[:200] or error.reason}), expected 200. Read the "
            "server's log"
        ) from error
    except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
        raise ServerError(
            f"{url}: no answer ({error or type(error).__name__}), expected one within "
            f"{timeout_s:g} s. Check that the server runs and that the address is right"
        ) from error
    return text


def _parse(text: str, url: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except ValueError as error:
        raise ServerError(f"{url}: replied with {text[:80]!r}, expected JSON ({error})") from error


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number in JSON")
