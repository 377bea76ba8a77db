"""Servers that hand out the states of ``fixtures/``, on real sockets, with faults to order."""

from __future__ import annotations

import fcntl
import json
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.verifier.server_requests import Outcome

FIXTURES = Path(__file__).with_name("fixtures")
CONTENT: dict[str, Any] = json.loads((FIXTURES / "server_states.json").read_text(encoding="utf-8"))
TRUTH = load_file(FIXTURES / "truth.safetensors")
COUNT = len(CONTENT["vllm"]["replies"])
NUM_LAYERS = CONTENT["sglang"]["num_layers"]
HIDDEN, NUM_AUX = 8, 3
LAYERS = (2, 16, 29)
LAST_LAYERS = (*LAYERS, NUM_LAYERS)
DOCUMENTS = [TRUTH[f"{place}.ids"] for place in range(COUNT)]
_PLACES = {tuple(ids.tolist()): place for place, ids in enumerate(DOCUMENTS)}
Fault = Callable[[int], str | None]
"""By the number of a request for states, from 1: the name of a fault; None: no fault."""


def aux(place: int) -> Tensor:
    """[n, K, H]"""
    return TRUTH[f"{place}.aux"].view(-1, NUM_AUX, HIDDEN)


class StatesServer:
    """One engine: what it replies, and what it was sent."""

    def __init__(self, fault: Fault = lambda _: None) -> None:
        self.fault = fault
        self.sent: list[dict[str, Any]] = []
        self.at_once = self.most_at_once = 0
        self.delay_s = 0.0
        self._lock = threading.Lock()

    def facts(self, path: str) -> Any:
        """The reply to a question about the server; None: no such path."""
        raise NotImplementedError

    def states(self, content: dict[str, Any], place: int, fault: str | None) -> Any:
        """The reply to a request for states."""
        raise NotImplementedError

    def ids(self, content: dict[str, Any]) -> list[int]:
        raise NotImplementedError

    def post(self, content: dict[str, Any]) -> tuple[str | None, bytes]:
        """A fault of the connection or None, and the body."""
        with self._lock:
            self.sent.append(content)
            fault = self.fault(len(self.sent))
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        time.sleep(self.delay_s)
        try:
            reply = self.states(content, _PLACES[tuple(self.ids(content))], fault)
        finally:
            with self._lock:
                self.at_once -= 1
        return fault, json.dumps(reply).encode()


class SglangServer(StatesServer):
    """Stock SGLang, started for aux states or for the last one."""

    def __init__(self, kind: str, fault: Fault = lambda _: None, **args: Any) -> None:
        super().__init__(fault)
        self.kind = kind
        gives_aux = kind == "aux"
        self.args = {
            "model_path": "/models/tiny",
            "dtype": "auto",
            "quantization": None,
            "chunked_prefill_size": -1,
            "return_hidden_states_mode": "full",
            "enable_return_hidden_states": not gives_aux,
            "enable_return_aux_hidden_states": gives_aux,
            "aux_hidden_state_capture": "eagle3" if gives_aux else None,
            "return_aux_hidden_state_layer_ids": [k - 1 for k in LAYERS] if gives_aux else None,
            **args,
        }
        self.architecture = "LlamaForCausalLM"

    def facts(self, path: str) -> Any:
        version = {"version": CONTENT["sglang"]["version"], "internal_states": [{}]}
        known = {
            "/server_info": self.args | version,
            "/model_info": {"architectures": [self.architecture]},
        }
        return known.get(path)

    def ids(self, content: dict[str, Any]) -> list[int]:
        return list(content["input_ids"])

    def states(self, content: dict[str, Any], place: int, fault: str | None) -> Any:
        meta = json.loads(json.dumps(CONTENT["sglang"]["replies"][place][self.kind]))
        rows = meta["hidden_states"][0]
        if fault == "short":
            meta["hidden_states"][0] = rows[1:]
        elif fault == "ragged":
            rows[-1] = rows[-1][1:]
        elif fault == "not a number":
            rows[0][0] = float("nan")
        elif fault == "null":
            rows[0][0] = None
        elif fault == "missing":
            del meta["hidden_states"]
        elif fault == "finer type":
            rows[0][0] = 1.0009765625
        ids = content["input_ids"] if fault != "other tokens" else content["input_ids"] + [1]
        return {"text": "", "output_ids": [1], "prompt_token_ids": ids, "meta_info": meta}


class VllmServer(StatesServer):
    """vLLM with the hidden-states connector: it replies first and writes after."""

    def __init__(self, shared: Path, fault: Fault = lambda _: None) -> None:
        super().__init__(fault)
        self.shared = shared
        self.write_s = 0.01
        self.writers: list[threading.Thread] = []
        self.held: list[Any] = []
        """Locks of files that are never written."""

    def close(self) -> None:
        for writer in self.writers:
            writer.join()
        for lock in self.held:
            lock.close()

    def facts(self, path: str) -> Any:
        known = {
            "/version": {"version": CONTENT["vllm"]["version"]},
            "/v1/models": {"data": [{"id": "tiny", "root": "/models/tiny"}]},
        }
        return known.get(path)

    def ids(self, content: dict[str, Any]) -> list[int]:
        return list(content["prompt"])

    def states(self, content: dict[str, Any], place: int, fault: str | None) -> Any:
        name = f"cmpl-{len(self.sent)}-{threading.get_ident()}.safetensors"
        path = self.shared / name
        lock = Path(f"{path}.lock").open("wb")  # noqa: SIM115  # held beyond the reply
        fcntl.flock(lock, fcntl.LOCK_EX)

        def write() -> None:
            time.sleep(self.write_s)
            source = FIXTURES / f"vllm_{place}.safetensors"
            if fault == "cut file":
                path.write_bytes(source.read_bytes()[:-5])
            elif fault == "other tokens":
                tensors = load_file(source)
                save_file({**tensors, "token_ids": tensors["token_ids"] + 1}, path)
            elif fault != "no file":
                shutil.copyfile(source, path)
            lock.close()

        if fault != "never written":
            writer = threading.Thread(target=write)
            self.writers.append(writer)
            writer.start()
        else:
            self.held.append(lock)
        transfer = {"hidden_states_path": f"/shared/{name}"}
        known = {"id": "1", "model": "tiny", "kv_transfer_params": transfer}
        if fault == "missing":
            known["kv_transfer_params"] = None  # type: ignore[assignment]
        choice = {"index": 0, "text": "a", "finish_reason": "length"}
        reply = {field: known.get(field) for field in CONTENT["vllm"]["reply_fields"]}
        fields = CONTENT["vllm"]["choice_fields"]
        return reply | {"choices": [{field: choice.get(field) for field in fields}]}


class Handler(BaseHTTPRequestHandler):
    """One connection; ``site`` is set by a class of each site's own."""

    site: Site

    def do_GET(self) -> None:
        found = self.site.server.facts(self.path)
        self._reply(404 if found is None else 200, json.dumps(found).encode())

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        fault, body = self.site.server.post(json.loads(self.rfile.read(length)))
        if fault == "restart":
            self.site.restart()
        if fault in ("reset", "restart"):
            self._reset()
        elif fault == "silence":
            time.sleep(3.0)
        elif fault in ("500", "503", "400", "404"):
            self._reply(int(fault), b"out of order")
        elif fault == "half a reply":
            self._reply(200, body[: len(body) // 2], len(body))
        elif fault == "slow":
            self._drip(body)
        else:
            self._reply(200, body)

    def _reset(self) -> None:
        # Closing with a linger of zero sends a reset instead of an end.
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.connection.close()
        self.close_connection = True

    def _drip(self, body: bytes) -> None:
        self._reply(200, b"", len(body))
        step = 1 + len(body) // 8
        for start in range(0, len(body), step):
            time.sleep(0.02)
            self.wfile.write(body[start : start + step])

    def _reply(self, status: int, body: bytes, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Not on the terminal."""


class Site:
    """An address at which a server answers, goes down and comes back."""

    def __init__(self, server: StatesServer) -> None:
        self.server, self.port = server, 0
        self.down_s = 0.3
        self.restarted: Callable[[], None] = lambda: None
        """Called while the server is down."""
        self.back = threading.Event()
        """Set once a restart is over."""
        self._restarts: list[threading.Thread] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._http = ThreadingHTTPServer(
            ("127.0.0.1", self.port), type("OwnHandler", (Handler,), {"site": self})
        )
        self.port = self._http.server_address[1]
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,))
        self._thread.start()

    def stop(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def close(self) -> None:
        for restart in self._restarts:
            restart.join()
        self.stop()

    def restart(self) -> None:
        def away() -> None:
            self.stop()
            self.restarted()
            time.sleep(self.down_s)
            self.start()
            self.back.set()

        self._restarts.append(threading.Thread(target=away))
        self._restarts[-1].start()


@contextmanager
def serve(server: StatesServer) -> Iterator[Site]:
    """The address at which ``server`` answers."""
    site = Site(server)
    site.start()
    try:
        yield site
    finally:
        site.close()


def verifier_directory(directory: Path, **changes: Any) -> Path:
    """The fixtures' verifier, as far as its description goes."""
    directory.mkdir()
    config = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": NUM_LAYERS,
        "vocab_size": 50,
        "rms_norm_eps": 1e-6,
        **changes,
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def in_order(outcomes: Iterator[Outcome]) -> list[Outcome]:
    """Outcomes in the order of the documents; each comes once."""
    found = list(outcomes)
    assert sorted(outcome.index for outcome in found) == list(range(COUNT))
    return sorted(found, key=lambda outcome: outcome.index)


def assert_states(found: Tensor | None, expected: Tensor | None) -> None:
    """Both are missing, or equal in type and to the last bit."""
    if found is None or expected is None:
        assert found is expected
    else:
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
