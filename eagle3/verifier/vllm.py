"""States that vLLM's hidden-states connector writes to a shared directory (read at 0.33.0).

A server started with the speculative method ``extract_hidden_states`` and the
``ExampleHiddenStatesConnector`` replies with the path of a file and goes on writing it. An
exclusive lock on ``path.lock`` is held from before the reply until the file is written::

    path        hidden_states [n, K + 1, H] in the model's dtype, token_ids int64 [n]
    path.lock   empty; released by the writer, also when writing failed

Layer ids are *entering* and go up to the number of layers, whose state is the one *before* the
final norm. The server does not tell over HTTP which ids it was started with, so they are said here
and their number is compared with the file's.

The connector says of itself that it cannot isolate its cache for some verifiers with multi-head
latent attention ("MLA verifiers are unsupported"): DeepSeek and Kimi are unproven.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from eagle3.errors import VerifierError
from eagle3.names import LastHidden, ServerForm
from eagle3.server_http import ServerError, get_json, post_json
from eagle3.verifier.base import VerifierDescription
from eagle3.verifier.states import Prefilled, StatesOffer, checked_states, dtype_name

_ASK_TIMEOUT_S = 20.0
_LOCK_POLL_S = 0.005
_MLA_FIELD = "kv_lora_rank"
_MLA_NOTE = (
    "verifier with multi-head latent attention: vLLM's connector is unproven for it, compare the "
    "first shard with another back end"
)


class VllmSource:
    """One server, and the directory that it shares with us."""

    def __init__(
        self,
        url: str,
        verifier: VerifierDescription,
        verifier_dir: Path,
        layer_ids: Sequence[int],
        shared: Path,
        *,
        server_path: str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        timeout_s: float = 600.0,
    ) -> None:
        """Nothing is asked yet.

        Args:
            url: Such as ``http://localhost:8000``.
            verifier: Sizes of the model that the server runs.
            verifier_dir: Its directory.
            layer_ids: ``eagle_aux_hidden_state_layer_ids`` of the server, ascending, the number of
                layers last.
            shared: ``shared_storage_path`` of the server, as it is called here.
            server_path: The same as the server calls it; None: by the same name.
            dtype: Of the files.
            timeout_s: Without a byte from the server, and for a file to be written.

        Raises:
            VerifierError: layer ids that give no last state, or no such directory.
        """
        self.url = url.rstrip("/").removesuffix("/v1")
        self._verifier, self._ids, self._dtype = verifier, tuple(layer_ids), dtype
        self._shared, self._server_path = shared, server_path or str(shared)
        self._timeout_s = timeout_s
        self._notes = (_MLA_NOTE,) if _is_mla(verifier_dir) else ()
        self._model: str | None = None
        _check_ids(self._ids, verifier)
        if not shared.is_dir():
            raise VerifierError(
                f"{shared}: no such directory, expected the server's shared_storage_path. Mount it "
                "here, and say how the server calls it where the names differ."
            )

    def offer(self) -> StatesOffer:
        """See :class:`eagle3.verifier.states.StatesSource`."""
        version = get_json(f"{self.url}/version", _ASK_TIMEOUT_S)
        listed = get_json(f"{self.url}/v1/models", _ASK_TIMEOUT_S)
        try:
            engine_version, model = str(version["version"]), listed["data"][0]
            self._model = str(model["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise ServerError(
                f"{self.url}: does not name its version and model, expected vLLM"
            ) from error
        return StatesOffer(
            engine="vLLM",
            version=engine_version,
            form=ServerForm.vllm_connector,
            model=str(model.get("root") or self._model),
            dtype=dtype_name(self._dtype),
            quantization=None,
            aux_layer_ids=self._ids[:-1],
            server_layer_ids=self._ids,
            last_hidden=LastHidden.pre_norm,
            notes=(*self._notes, "layer ids as declared, the server does not tell them"),
        )

    def prefill(self, token_ids: Tensor) -> Prefilled:
        """See :class:`eagle3.verifier.states.StatesSource`."""
        if self._model is None:
            self.offer()
        content = {
            "model": self._model,
            "prompt": token_ids.tolist(),
            "max_tokens": 1,
            "temperature": 0.0,
            "add_special_tokens": False,
        }
        reply = post_json(
            f"{self.url}/v1/completions", content, timeout_s=self._timeout_s, attempts=1
        )
        path = self._local(reply)
        try:
            found = self._load(path)
        finally:
            path.unlink(missing_ok=True)
            Path(f"{path}.lock").unlink(missing_ok=True)
        return self._checked(found, token_ids, path)

    def _local(self, reply: Any) -> Path:
        """The file's path here; only files of the shared directory are read and removed."""
        transfer = reply.get("kv_transfer_params") if isinstance(reply, dict) else None
        said = transfer.get("hidden_states_path") if isinstance(transfer, dict) else None
        if said is None:
            raise ServerError(
                f"{self.url}: replied without kv_transfer_params.hidden_states_path, expected the "
                "path of the states. Start vLLM with the speculative method extract_hidden_states "
                "and the ExampleHiddenStatesConnector."
            )
        given = Path(said)
        if given.parent != Path(self._server_path) or given.suffix != ".safetensors":
            raise VerifierError(
                f"{self.url}: wrote states to {said}, expected a .safetensors file in "
                f"{self._server_path}. Say how the server calls its shared_storage_path."
            )
        return self._shared / given.name

    def _load(self, path: Path) -> dict[str, Tensor]:
        """Read the file once its writer let go of the lock."""
        limit = time.monotonic() + self._timeout_s
        try:
            with Path(f"{path}.lock").open("rb") as lock:
                # Asked again and again, since a lock over a network may never be granted.
                while not _granted(lock.fileno()):
                    if time.monotonic() > limit:
                        raise ServerError(
                            f"{path}: still being written after {self._timeout_s:g} s, expected it "
                            "to be whole. Look at the server's disk"
                        )
                    time.sleep(_LOCK_POLL_S)
                return load(path.read_bytes())
        except (OSError, SafetensorError) as error:
            raise ServerError(
                f"{path}: cannot be read ({error}), expected a whole file and its .lock. Check "
                "that the directory is the server's, that use_synchronization_lock is on, and "
                "that the server's disk is not full"
            ) from error

    def _checked(self, found: dict[str, Tensor], token_ids: Tensor, path: Path) -> Prefilled:
        ids, states = found.get("token_ids"), found.get("hidden_states")
        if ids is None or states is None or not torch.equal(ids.to(torch.int64), token_ids):
            raise ServerError(
                f"{path}: holds {sorted(found)}, expected hidden_states and the "
                f"{len(token_ids)} token_ids that were sent"
            )
        if states.dtype != self._dtype or states.shape[1:2] != (len(self._ids),):
            raise VerifierError(
                f"{path}: states of shape {list(states.shape)} in {dtype_name(states.dtype)}, "
                f"expected {len(self._ids)} layers in {dtype_name(self._dtype)}. Say the layer ids "
                "and the type that the server was started with."
            )
        shape = (len(token_ids), len(self._ids), self._verifier.hidden_size)
        whole = checked_states(states, shape, self._dtype, str(path), "")
        return Prefilled(whole[:, :-1], whole[:, -1])


def _granted(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _check_ids(ids: tuple[int, ...], verifier: VerifierDescription) -> None:
    ascending = all(a < b for a, b in pairwise(ids))
    if len(ids) < 2 or not ascending or ids[0] < 0 or ids[-1] != verifier.num_layers:
        raise VerifierError(
            f"layer ids of the server are {list(ids)}, expected ascending ones that end with "
            f"{verifier.num_layers}, the state before the final norm of {verifier.name}. Start "
            "vLLM with them in eagle_aux_hidden_state_layer_ids."
        )


def _is_mla(directory: Path) -> bool:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return _MLA_FIELD in config.get("text_config", config)
