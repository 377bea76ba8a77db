"""States of an SGLang server with SpecForge's capture patch, through a Mooncake store.

The patch (``patches/sglang/*/spec-capture.patch`` of sgl-project/SpecForge, read for 0.5.20) adds
``--enable-spec-capture``. A request then carries ``spec_capture``; the server writes each tensor as
one object of raw bytes and replies with shapes and types only::

    {store_id}/{sample_id}/g{gen}/hidden_state     aux states [.., n, K * H]
    {store_id}/{sample_id}/g{gen}/target           last state after the final norm [.., n, H]

Objects are pinned until somebody removes them, so each is removed as soon as it is read. A sample's
name is the hash of its tokens and is replaced by a second try: what a lost reply leaves behind is
one object, not one a try.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from typing import Any, Protocol

import torch
from torch import Tensor

from eagle3.errors import VerifierError
from eagle3.names import LastHidden, LayerIdConvention, ServerForm
from eagle3.server_http import ServerError
from eagle3.verifier.base import VerifierDescription
from eagle3.verifier.sglang import entering_ids, generate, server_facts
from eagle3.verifier.states import Prefilled, StatesOffer, checked_states, dtype_name

_FEATURES = {"aux": "hidden_state", "last_hidden": "target"}
_GENERATION = 1
_UNPROVEN = "the capture patch was read and not run: check the first shard against another back end"


class ObjectStore(Protocol):
    """What is used of a Mooncake store's client."""

    def get(self, key: str) -> bytes:
        """Raw bytes; empty when there is no such object."""
        ...

    def remove(self, key: str) -> Any:
        """Forget an object; nothing happens when there is none."""
        ...


class SpecForgeSource:
    """One server with the capture patch, and the store it writes to."""

    def __init__(
        self,
        url: str,
        verifier: VerifierDescription,
        store: ObjectStore,
        *,
        dtype: torch.dtype = torch.bfloat16,
        convention: LayerIdConvention | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """Nothing is asked yet; arguments as of :class:`eagle3.verifier.sglang.SglangSource`."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self._verifier, self._store, self._dtype = verifier, store, dtype
        self._convention, self._timeout_s = convention, timeout_s
        self._store_id = f"eagle3-{uuid.uuid4().hex}"
        """Of this process, so that nothing of an earlier one can be read by mistake."""
        self._offered: StatesOffer | None = None

    def offer(self) -> StatesOffer:
        """See :class:`eagle3.verifier.states.StatesSource`."""
        info, verifier_class = server_facts(self.url, self._dtype)
        method = info.get("spec_capture_method")
        if not info.get("enable_spec_capture") or method != "eagle3":
            raise VerifierError(
                f"{self.url}: does not capture (method {method!r}), expected EAGLE-3's. Patch "
                "SGLang with SpecForge's spec-capture.patch and start it with "
                "--enable-spec-capture --spec-capture-method eagle3 --chunked-prefill-size -1."
            )
        told, version = info.get("spec_capture_aux_layer_ids"), str(info["version"])
        layers = self._verifier.num_layers
        offer = StatesOffer(
            engine="SGLang",
            version=version,
            form=ServerForm.sglang_spec_capture,
            model=str(info.get("model_path")),
            dtype=dtype_name(self._dtype),
            quantization=info.get("quantization"),
            aux_layer_ids=entering_ids(verifier_class, told, layers, version, self._convention),
            server_layer_ids=None if told is None else tuple(told),
            last_hidden=LastHidden.post_norm,
            notes=(_UNPROVEN,),
        )
        self._offered = offer
        return offer

    def prefill(self, token_ids: Tensor) -> Prefilled:
        """See :class:`eagle3.verifier.states.StatesSource`."""
        offer = self._offered or self.offer()
        sample = hashlib.sha256(token_ids.numpy().tobytes()).hexdigest()
        request = {
            "store_id": self._store_id,
            "sample_id": sample,
            "gen": _GENERATION,
            "replace": True,
            "features": _FEATURES,
            "passthrough": [],
        }
        reply = generate(self.url, token_ids, {"spec_capture": request}, timeout_s=self._timeout_s)
        features = self._features(reply["meta_info"], sample, offer)
        num_tokens, hidden = len(token_ids), self._verifier.hidden_size
        num_aux = len(offer.aux_layer_ids)
        aux = self._read(features, "aux", sample, (num_tokens, num_aux * hidden))
        last = self._read(features, "last_hidden", sample, (num_tokens, hidden))
        return Prefilled(aux.view(num_tokens, num_aux, hidden), last)

    def _features(self, meta: dict[str, Any], sample: str, offer: StatesOffer) -> dict[str, Any]:
        """Shapes and types by name; older patches wrap the result into a list of one."""
        failed, found = meta.get("spec_capture_error"), meta.get("spec_capture")
        if isinstance(found, list) and len(found) == 1:
            found = found[0]
        if isinstance(found, dict):
            failed = failed or found.get("error")
        if failed or not isinstance(found, dict) or found.get("sample_id") != sample:
            raise ServerError(
                f"{self.url}: no capture of this document ({failed or 'spec_capture is missing'}), "
                "expected its objects in the store. Read the server's log"
            )
        ids, told = found.get("aux_layer_ids"), offer.server_layer_ids
        if told is not None and tuple(ids or ()) != told:
            raise VerifierError(
                f"{self.url}: captured layers {ids}, expected {list(told)} as it was started with."
            )
        features = found.get("features")
        return features if isinstance(features, dict) else {}

    def _read(
        self, features: dict[str, Any], artifact: str, sample: str, shape: tuple[int, ...]
    ) -> Tensor:
        """One object as [n, width]; it is removed from the store."""
        name = _FEATURES[artifact]
        said = features.get(name)
        if not isinstance(said, dict) or said.get("dtype") != dtype_name(self._dtype):
            raise ServerError(
                f"{self.url}: feature {name} is {said}, expected one in {dtype_name(self._dtype)}"
            )
        key = f"{self._store_id}/{sample}/g{_GENERATION}/{name}"
        content = self._store.get(key)
        self._store.remove(key)
        wanted = shape[0] * shape[1] * self._dtype.itemsize
        if len(content) != wanted:
            raise ServerError(
                f"{self.url}: object {key} has {len(content)} bytes, expected {wanted} for "
                f"{list(shape)}; the server said {said.get('shape')}"
            )
        # A copy, since the bytes belong to the store's client and cannot be written to.
        states = torch.frombuffer(bytearray(content), dtype=self._dtype).view(shape)
        return checked_states(states, shape, self._dtype, self.url, "")


def connect_mooncake() -> ObjectStore:
    """The store that the ``MOONCAKE_*`` environment names, as the server's sink connects to it.

    Raises:
        VerifierError: the client is not installed, or cannot connect.
    """
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise VerifierError(
            f"Reading SpecForge's captures needs Mooncake's client ({error}). Install with: "
            "pip install mooncake-transfer-engine"
        ) from error
    store = MooncakeDistributedStore()
    variables = os.environ
    status = store.setup(
        variables.get("MOONCAKE_LOCAL_HOSTNAME", "localhost"),
        variables.get("MOONCAKE_METADATA_SERVER", "http://localhost:8080/metadata"),
        int(variables.get("MOONCAKE_GLOBAL_SEGMENT_SIZE", 0)),
        int(variables.get("MOONCAKE_LOCAL_BUFFER_SIZE", 1 << 30)),
        variables.get("MOONCAKE_PROTOCOL", "tcp"),
        variables.get("MOONCAKE_RDMA_DEVICES", ""),
        variables.get("MOONCAKE_MASTER_SERVER_ADDR", "localhost:50051"),
    )
    if status:
        raise VerifierError(
            f"Mooncake's client cannot connect (status {status}), expected the server's store. Set "
            "MOONCAKE_MASTER_SERVER_ADDR and MOONCAKE_METADATA_SERVER as for the server."
        )
    client: ObjectStore = store
    return client
