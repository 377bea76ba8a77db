"""Local HTTP servers that reply as the engines do, see make_server_fixtures.py."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

REPLIES: dict[str, Any] = json.loads(
    Path(__file__).with_name("server_replies.json").read_text(encoding="utf-8")
)
Fault = Callable[[int], tuple[int, bytes] | None]
"""By the number of a chat request, from 1: status and body instead of the reply; None: no fault."""


class FakeServer:
    """Serves one engine's fixtures and remembers what it was sent."""

    def __init__(self, engine: str, fault: Fault = lambda _: None) -> None:
        self.engine, self.fault = engine, fault
        self.sent: list[dict[str, Any]] = []
        self.metrics = ["metrics_before", "metrics_after"]
        self._lock = threading.Lock()

    def get(self, path: str) -> tuple[int, bytes]:
        replies = REPLIES[self.engine]
        if path == "/metrics" and self.engine == "vllm":
            name = self.metrics.pop(0)
            return 200, replies.get(name, "").encode()
        if path == "/v1/models":
            return 200, b'{"data": [{"id": "kimi"}]}'
        name = path.lstrip("/")
        return (200, json.dumps(replies[name]).encode()) if name in replies else (404, b"no")

    def post(self, content: dict[str, Any]) -> tuple[int, bytes]:
        with self._lock:
            self.sent.append(content)
            number = len(self.sent)
        return self.fault(number) or (200, json.dumps(REPLIES[self.engine]["chat"]).encode())


@contextmanager
def serve(server: FakeServer) -> Iterator[str]:
    """The address at which ``server`` answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(*server.get(self.path))

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            self._reply(*server.post(json.loads(self.rfile.read(length))))

        def _reply(self, status: int, body: bytes) -> None:
            if status == 0:  # a server that goes down in the middle of a request
                self.connection.close()
                return
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Not on the terminal."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
