"""Asking a server for many documents: tries, a server that restarts, and back-pressure."""

from __future__ import annotations

import http.client
import threading
import time
import urllib.error
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from torch import Tensor

from eagle3.capture_progress import print_line
from eagle3.errors import VerifierError
from eagle3.server_http import ServerError
from eagle3.verifier.states import Prefilled, StatesOffer, StatesSource

_MAY_PASS = (408, 409, 425, 429)
"""Refusals that say: later."""
_MISUSED = (401, 403, 404)
"""Refusals that the next document would meet too."""
_RESTARTING = (502, 503, 504)
_HOPELESS = 8
"""Failures before the first success, after which it is the server and not the documents."""


@dataclass(frozen=True)
class ServerSettings:
    """How a server is asked."""

    in_flight: int = 16
    """Documents that are asked for, or wait to be stored, at a time: the bound on memory."""
    attempts: int = 4
    """Tries for one document."""
    pause_s: float = 0.5
    """Before a second try; doubled each time."""
    patience_s: float = 1800.0
    """For a server that is down to come back; large models load for many minutes."""
    poll_s: float = 2.0
    """Between two looks at a server that is down."""


@dataclass(frozen=True)
class Outcome:
    """What became of one document."""

    index: int
    """Its place among those given."""
    states: Prefilled | None
    error: str
    """Why there are no states; empty: there are."""


def capture_documents(
    source: StatesSource,
    documents: Iterable[Tensor],
    settings: ServerSettings,
    say: Callable[[str], None] = print_line,
) -> Iterator[Outcome]:
    """Ask for many documents, ``settings.in_flight`` of them at a time.

    A document is taken from ``documents`` only when an earlier one was yielded and the caller came
    back for more, so a slow disk slows the requests and memory stays bounded. A document that
    fails in all its tries is yielded with its error and stops nothing, unless none of the first
    ones succeeds.

    Args:
        source: Of states.
        documents: int64 [n], n >= 1.
        settings: Tries and limits.
        say: Takes a line when the server goes down, and when it is back.

    Yields:
        One outcome per document, in the order in which they end.

    Raises:
        ServerError: the server does not answer at the start or at the end.
        VerifierError: it was down and did not come back in time, or it gives other states than at
            the start, or gives none at all. One that changes while no document is asked for is
            noticed at the end only.
    """
    asker = _Asker(source, settings, say)
    waiting: dict[Future[Prefilled], int] = {}
    upcoming = iter(enumerate(documents))
    pool = ThreadPoolExecutor(settings.in_flight, thread_name_prefix="states")
    try:
        while True:
            while len(waiting) < settings.in_flight and (entry := next(upcoming, None)):
                waiting[pool.submit(asker.ask, entry[1])] = entry[0]
            if not waiting:
                break
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                yield asker.outcome(waiting.pop(future), future)
                del future  # its states would stay until the next one ends
        asker.check_unchanged()
    finally:
        asker.stopped.set()
        pool.shutdown(cancel_futures=True)


class _GaveUpError(Exception):
    """All tries for one document failed."""


class _Asker:
    """Tries for documents, and one common wait when the server is down."""

    def __init__(
        self, source: StatesSource, settings: ServerSettings, say: Callable[[str], None]
    ) -> None:
        self.stopped = threading.Event()
        self._source, self._settings, self._say = source, settings, say
        self._offer = source.offer()
        self._recovering = threading.Lock()
        self._failure: VerifierError | None = None
        self._succeeded, self._failed = 0, 0

    def ask(self, token_ids: Tensor) -> Prefilled:
        for attempt in range(1, self._settings.attempts + 1):
            try:
                states = self._source.prefill(token_ids)
            except ServerError as error:
                self._after(error, attempt)
            else:
                # A server that comes back with other options gives other states. Until the thread
                # that waits for it has looked, nothing that it sent is handed on.
                with self._recovering:
                    self._leave_if_stopped()
                    return states
        raise AssertionError("attempts is at least 1")

    def outcome(self, index: int, future: Future[Prefilled]) -> Outcome:
        try:
            found = Outcome(index, future.result(), "")
        except _GaveUpError as given_up:
            if self._failure is not None:  # of another document, and the reason of this one's
                raise self._failure from None
            self._failed += 1
            if not self._succeeded and self._failed >= _HOPELESS:
                raise VerifierError(
                    f"None of the first {self._failed} documents got states, expected all. The "
                    f"last error: {given_up}"
                ) from given_up
            return Outcome(index, None, str(given_up))
        self._succeeded += 1
        return found

    def check_unchanged(self) -> None:
        """Compare what the server gives with what it gave at the start."""
        _compare(self._offer, self._source.offer())

    def _after(self, error: ServerError, attempt: int) -> None:
        """Wait until another try makes sense, or give up."""
        status = error.status
        if status in _MISUSED:
            self._stop(VerifierError(f"{error}. Check the address and the server's options."))
        refused = status is not None and 400 <= status < 500 and status not in _MAY_PASS
        if refused or attempt == self._settings.attempts:
            raise _GaveUpError(f"{error} (try {attempt} of {self._settings.attempts})") from error
        if _is_down(error):
            with self._recovering:
                self._wait_for_return(error)
        self.stopped.wait(self._settings.pause_s * 2 ** (attempt - 1))
        self._leave_if_stopped()

    def _wait_for_return(self, cause: ServerError) -> None:
        limit = time.monotonic() + self._settings.patience_s
        told = False
        while not self.stopped.is_set():
            try:
                _compare(self._offer, self._source.offer())
            except ServerError as error:
                if time.monotonic() > limit:
                    self._stop(
                        VerifierError(
                            f"{error}. It is down since {self._settings.patience_s:g} s, expected "
                            "it back by now. Start it again, then this command."
                        )
                    )
                if not told:
                    self._say(f"server is down, waiting for it: {cause}")
                    told = True
                self.stopped.wait(self._settings.poll_s)
            except VerifierError as error:
                self._stop(error)
            else:
                if told:
                    self._say("server is back")
                return

    def _stop(self, failure: VerifierError) -> None:
        self._failure = self._failure or failure
        self.stopped.set()
        raise failure

    def _leave_if_stopped(self) -> None:
        if self.stopped.is_set():
            raise _GaveUpError("the capture was stopped")


def _compare(before: StatesOffer, now: StatesOffer) -> None:
    then, found = before.record(), now.record()
    changed = [
        f"{key}: {then[key]!r}, now {found[key]!r}" for key in then if then[key] != found[key]
    ]
    if changed:
        raise VerifierError(
            "The server gives other states than at the start of this capture: "
            f"{'; '.join(changed)}. Expected no change within a data set. Start it with the old "
            "options and capture again what came since, or capture into another directory."
        )


def _is_down(error: ServerError) -> bool:
    """Whether there is no server at the moment, as opposed to one that fails."""
    cause: object = error.__cause__
    if error.status in _RESTARTING:
        return True
    if isinstance(cause, urllib.error.URLError) and not isinstance(cause, urllib.error.HTTPError):
        cause = cause.reason
    return isinstance(cause, ConnectionError | http.client.RemoteDisconnected)
