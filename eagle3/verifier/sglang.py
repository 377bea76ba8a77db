"""States in SGLang's own replies: ``/generate`` with ``return_hidden_states`` (read at 0.5.23).

One server gives one kind of state, by how it was started:

=========================================  ====================================================
``--enable-return-hidden-states``          the last state, *after* the final norm
``--enable-return-aux-hidden-states``      the aux states side by side, and not the last one
``--speculative-algorithm EAGLE3``         (names the layers' convention; no draft is loaded)
=========================================  ====================================================

So a data set takes two servers, see :class:`SglangPair`, or SpecForge's patch, see
:mod:`eagle3.verifier.specforge`. The states travel as JSON text, 12 bytes a value where
bfloat16 takes two: good for small verifiers and for comparing back ends.

The last state is what enters the engine's logits step. Classes that put another state of their own
into the reply (``hidden_states_before_norm`` in ``srt/models``) are refused.

A prefill in chunks keeps the rows of its last chunk only, and a chunk is a budget that documents
share, so any document may lose rows. It has to be off. A prefix found in the cache loses its rows
as well; each try has an ``extra_key`` of its own, under which nothing is cached.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle3.errors import VerifierError
from eagle3.names import LastHidden, LayerIdConvention, ServerForm
from eagle3.server_http import ServerError, get_json, post_json
from eagle3.serving.layer_ids import ADD_ONE_CLASSES, DEEPSEEK_CLASSES, FIRST_IS_ONE, GPT_OSS
from eagle3.serving.versions import show
from eagle3.verifier.base import VerifierDescription
from eagle3.verifier.states import Prefilled, StatesOffer, checked_states, dtype_name

BEFORE_NORM_CLASSES = frozenset(
    {
        "DeepseekV4ForCausalLM",
        "InklingForConditionalGeneration",
        "MiMoV2FlashForCausalLM",
        "MiMoV2ForCausalLM",
        "Step3p5ForCausalLM",
    }
)
_ASK_TIMEOUT_S = 20.0
_SHORT = (
    "Rows are missing where a prefill ran in chunks or found its prefix in the cache: start the "
    "server with --chunked-prefill-size -1"
)
_NO_CHUNKS = (None, -1)


class SglangSource:
    """One server, started for one kind of state."""

    def __init__(
        self,
        url: str,
        verifier: VerifierDescription,
        form: ServerForm,
        *,
        dtype: torch.dtype = torch.bfloat16,
        convention: LayerIdConvention | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """Nothing is asked yet.

        Args:
            url: Such as ``http://localhost:30000``.
            verifier: Sizes of the model that the server runs.
            form: ``sglang_aux`` or ``sglang_last``.
            dtype: In which the server computes; the replies do not say it.
            convention: Of the server's layer ids, for verifier classes whose rule is not known.
            timeout_s: Without a byte from the server.
        """
        self.url = url.rstrip("/").removesuffix("/v1")
        self._verifier, self._form, self._dtype = verifier, form, dtype
        self._convention, self._timeout_s = convention, timeout_s
        self._num_aux: int | None = None

    def offer(self) -> StatesOffer:
        """See :class:`eagle3.verifier.states.StatesSource`."""
        info, verifier_class = server_facts(self.url, self._dtype)
        wants_aux = self._form is ServerForm.sglang_aux
        check_started_for(info, wants_aux, self.url)
        told = info.get("return_aux_hidden_state_layer_ids") if wants_aux else None
        layers = self._verifier.num_layers
        entering = (
            entering_ids(verifier_class, told, layers, str(info["version"]), self._convention)
            if wants_aux
            else ()
        )
        self._num_aux = len(entering)
        return StatesOffer(
            engine="SGLang",
            version=str(info["version"]),
            form=self._form,
            model=str(info.get("model_path")),
            dtype=dtype_name(self._dtype),
            quantization=info.get("quantization"),
            aux_layer_ids=entering,
            server_layer_ids=None if told is None else tuple(told),
            last_hidden=None if wants_aux else LastHidden.post_norm,
        )

    def prefill(self, token_ids: Tensor) -> Prefilled:
        """See :class:`eagle3.verifier.states.StatesSource`."""
        reply = generate(
            self.url, token_ids, {"return_hidden_states": True}, timeout_s=self._timeout_s
        )
        wide = _rows(reply, self.url)
        hidden = self._verifier.hidden_size
        if self._form is ServerForm.sglang_last:
            shape: tuple[int, ...] = (len(token_ids), hidden)
            return Prefilled(None, checked_states(wide, shape, self._dtype, self.url, _SHORT))
        if self._num_aux is None:
            self.offer()
        num_aux = self._num_aux or 0
        shape = (len(token_ids), num_aux * hidden)
        states = checked_states(wide, shape, self._dtype, self.url, _SHORT)
        return Prefilled(states.view(len(token_ids), num_aux, hidden), None)


class SglangPair:
    """Two servers with the same model: one gives the aux states, the other the last state."""

    def __init__(self, aux: SglangSource, last: SglangSource) -> None:
        self._aux, self._last = aux, last

    def offer(self) -> StatesOffer:
        """See :class:`eagle3.verifier.states.StatesSource`."""
        aux, last = self._aux.offer(), self._last.offer()
        for key in ("model", "version", "dtype", "quantization"):
            here, there = getattr(aux, key), getattr(last, key)
            if here != there:
                raise VerifierError(
                    f"{self._aux.url} has {key} {here!r}, {self._last.url} has {there!r}, expected "
                    "the same of both. Start both from one model directory and one release."
                )
        return replace(aux, form=f"{aux.form}+{last.form}", last_hidden=last.last_hidden)

    def prefill(self, token_ids: Tensor) -> Prefilled:
        """See :class:`eagle3.verifier.states.StatesSource`."""
        aux = self._aux.prefill(token_ids).aux
        return Prefilled(aux, self._last.prefill(token_ids).last)


def server_facts(url: str, dtype: torch.dtype) -> tuple[dict[str, Any], str]:
    """``/server_info``, and the class of the model.

    Raises:
        ServerError: no answer, or not SGLang's.
        VerifierError: prefill in chunks, another dtype, or a class that replies with other states.
    """
    info = get_json(f"{url}/server_info", _ASK_TIMEOUT_S)
    classes = get_json(f"{url}/model_info", _ASK_TIMEOUT_S).get("architectures") or [None]
    if not isinstance(info, dict) or "version" not in info or classes[0] is None:
        raise ServerError(
            f"{url}: does not name its version and its model's architecture, expected SGLang"
        )
    if info.get("chunked_prefill_size") not in _NO_CHUNKS:
        raise VerifierError(
            f"{url}: chunked_prefill_size is {info['chunked_prefill_size']}, expected -1: states "
            "of all chunks but the last are lost. Start it with --chunked-prefill-size -1."
        )
    if info.get("dtype") not in (None, "auto", dtype_name(dtype)):
        raise VerifierError(
            f"{url}: computes in {info['dtype']}, expected {dtype_name(dtype)}. Say the type that "
            "the server was started with."
        )
    if classes[0] in BEFORE_NORM_CLASSES:
        raise VerifierError(
            f"{url}: {classes[0]} puts a state of its own into the replies, expected the one after "
            "the final norm. Capture with vLLM or the Hugging Face back end."
        )
    return info, str(classes[0])


def check_started_for(info: dict[str, Any], wants_aux: bool, url: str) -> None:
    """Raise :class:`VerifierError` where the server was started for another kind of state."""
    gives_aux = bool(info.get("enable_return_aux_hidden_states"))
    family = info.get("aux_hidden_state_capture")
    gives_any = bool(
        info.get("return_hidden_states_mode") == "full" or info.get("enable_return_hidden_states")
    )
    if wants_aux and not (gives_aux and family == "eagle3"):
        raise VerifierError(
            f"{url}: does not return aux states (family {family!r}), expected EAGLE-3's. Start it "
            "with --enable-return-aux-hidden-states --speculative-algorithm EAGLE3 "
            "--chunked-prefill-size -1."
        )
    if not wants_aux and (gives_aux or not gives_any):
        found = "aux states instead of the last one" if gives_aux else "no states"
        raise VerifierError(
            f"{url}: returns {found}, expected the last state. Start it with "
            "--enable-return-hidden-states --chunked-prefill-size -1, and without "
            "--enable-return-aux-hidden-states."
        )


def entering_ids(
    verifier_class: str,
    ids: list[int] | None,
    num_layers: int,
    version: str,
    convention: LayerIdConvention | None = None,
) -> tuple[int, ...]:
    """Layers that the captured states enter, by the rule of the model's class.

    ``set_eagle3_layers_to_capture`` of ``srt/models``, as :mod:`eagle3.serving.layer_ids` has it;
    states come in the order of the layers, whatever the order of the ids.

    Args:
        verifier_class: First of the ``architectures``.
        ids: The server's; None: it chose them.
        num_layers: Of the verifier.
        version: Of SGLang.
        convention: Of ``ids``, for a class whose rule is not known.

    Raises:
        VerifierError: the rule is not known and not given, or a layer that is not there.
    """
    known = ADD_ONE_CLASSES | DEEPSEEK_CLASSES | {GPT_OSS}
    if verifier_class not in known and (ids is None or convention is None):
        raise VerifierError(
            f"It is not known which layers SGLang means for {verifier_class} by ids {ids}. Start "
            "it with --return-aux-hidden-state-layer-ids, read set_eagle3_layers_to_capture of its "
            "class, and give the convention: after (most classes) or entering."
        )
    if ids is None:
        return (2, num_layers // 2, num_layers - 3)
    if verifier_class in DEEPSEEK_CLASSES:
        first = FIRST_IS_ONE.present
        if _numbers(version) < first:
            raise VerifierError(
                f"SGLang {version} reads layer ids of {verifier_class} by another rule, expected "
                f"{show(first)} or later."
            )
        kept = ids[0] != 1
    elif verifier_class == GPT_OSS:
        kept = max(ids) == num_layers
    elif verifier_class in ADD_ONE_CLASSES:
        kept = False
    else:
        kept = convention is LayerIdConvention.entering
    entering = tuple(sorted(ids if kept else [k + 1 for k in ids]))
    if entering[-1] > num_layers:
        raise VerifierError(
            f"SGLang is to capture the states entering layers {list(entering)}, expected 0 to "
            f"{num_layers}. Correct --return-aux-hidden-state-layer-ids."
        )
    return entering


def generate(url: str, token_ids: Tensor, extra: dict[str, Any], timeout_s: float) -> Any:
    """One prefill of exactly these tokens, without the prefix cache.

    Raises:
        ServerError: no reply, or one for other tokens.
    """
    ids = token_ids.tolist()
    content = {
        "input_ids": ids,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
        "return_prompt_token_ids": True,
        "extra_key": uuid.uuid4().hex,
        **extra,
    }
    reply = post_json(f"{url}/generate", content, timeout_s=timeout_s, attempts=1)
    found = reply.get("prompt_token_ids") if isinstance(reply, dict) else None
    if found != ids:
        length = "none" if found is None else str(len(found))
        raise ServerError(
            f"{url}: replied for {length} token ids, expected the {len(ids)} that were sent, in "
            "prompt_token_ids"
        )
    if not isinstance(reply.get("meta_info"), dict):
        raise ServerError(f"{url}: replied without meta_info, expected SGLang's /generate")
    return reply


def _rows(reply: Any, url: str) -> Tensor:
    """[n, width] float32; NaN where the text has null."""
    found = reply["meta_info"].get("hidden_states")
    if not isinstance(found, list) or len(found) != 1:
        size = len(found) if isinstance(found, list) else "no"
        raise ServerError(
            f"{url}: meta_info.hidden_states has {size} parts, expected one, the prefill's"
        )
    try:
        return torch.from_numpy(np.asarray(found[0], dtype=np.float32))
    except (TypeError, ValueError) as error:
        raise ServerError(
            f"{url}: meta_info.hidden_states is no table of numbers ({error})"
        ) from error


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:3]
    return tuple(int(part) for part in parts if part.isdecimal())
