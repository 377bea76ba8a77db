"""SGLang with SpecForge's capture patch, and the store that it writes to."""

from __future__ import annotations

import threading
from typing import Any

import torch

from tests.verifier.servers import LAYERS, TRUTH, Fault, SglangServer


class Objects:
    """A store of raw bytes: an empty reply for a missing key, pinned until removed."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.lock = threading.Lock()

    def put(self, key: str, content: bytes) -> None:
        with self.lock:
            self.held[key] = content

    def get(self, key: str) -> bytes:
        with self.lock:
            return self.held.get(key, b"")

    def remove(self, key: str) -> int:
        with self.lock:
            return 0 if self.held.pop(key, None) is not None else -1


class CaptureServer(SglangServer):
    """SGLang with the patch: writes objects, replies with their shapes."""

    def __init__(self, fault: Fault = lambda _: None, wrapped: bool = False) -> None:
        more = {
            "enable_spec_capture": True,
            "spec_capture_method": "eagle3",
            "spec_capture_aux_layer_ids": [k - 1 for k in LAYERS],
        }
        super().__init__("last", fault, **more)
        self.objects, self.wrapped = Objects(), wrapped

    def states(self, content: dict[str, Any], place: int, fault: str | None) -> Any:
        asked = content["spec_capture"]
        features = {}
        for artifact, states in (
            ("aux", TRUTH[f"{place}.aux"]),
            ("last_hidden", TRUTH[f"{place}.post_norm"]),
        ):
            name = asked["features"][artifact]
            key = f"{asked['store_id']}/{asked['sample_id']}/g{asked['gen']}/{name}"
            sent = states[1:] if fault == "short" else states
            if fault != "lost object":
                self.objects.put(key, sent.contiguous().view(torch.uint8).numpy().tobytes())
            features[name] = {"shape": [1, *sent.shape], "dtype": "bfloat16"}
        result: dict[str, Any] = {
            "sample_id": asked["sample_id"],
            "aux_layer_ids": self.args["spec_capture_aux_layer_ids"],
            "features": features,
        }
        if fault == "sink error":
            result = {"sample_id": asked["sample_id"], "error": "store is full"}
        elif fault == "missing":
            result = {}
        elif fault == "other layers":
            result["aux_layer_ids"] = [5, 6, 7]
        meta = {"spec_capture": [result] if self.wrapped else result}
        return {"prompt_token_ids": content["input_ids"], "meta_info": meta}
