"""Which layer ids an engine must be told, so that it captures what the drafter was trained on.

Our ids count the layers that states *enter*: k is the residual stream entering layer k. vLLM counts
the same way and reads them at the top of ``config.json``. SGLang reads ids nested in
``eagle_config`` and turns them into a list of layers to enter, by a rule that depends on the
verifier's class and on the release (``set_eagle3_layers_to_capture`` of its ``models/*.py``)::

    most classes               list = ids + 1
    GPT-OSS                    list = ids     where the largest id is the number of layers
    DeepSeek, Kimi-K2, -K2.5   list = ids + 1 up to 0.5.12
                               list = ids + 1 from 0.5.14 where the first id is 1, else ids
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from eagle3.errors import ConfigError
from eagle3.serving.versions import NEWEST_SGLANG, OLDEST_SGLANG, Change, Version, show

DEEPSEEK_CLASSES = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "KimiK25ForConditionalGeneration",
        "Glm4MoeLiteForCausalLM",
    }
)
GPT_OSS = "GptOssForCausalLM"
ADD_ONE_CLASSES = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Classes that are known to follow the rule of most."""
FIRST_IS_ONE = Change((0, 5, 12), (0, 5, 14))
"""The rule of the DeepSeek classes that looks at the first id."""
FIRST_SERVED = {"KimiK25ForConditionalGeneration": Change((0, 5, 9), (0, 5, 12))}
"""Classes that SGLang captures layers of only since some release."""


@dataclass(frozen=True)
class SglangIds:
    """The nested ids, and the releases in which they mean what was trained."""

    ids: tuple[int, ...]
    first: Version
    last: Version | None
    """Null: also the newest that is known."""
    notes: tuple[str, ...]
    """For the card and the terminal."""

    @property
    def releases(self) -> str:
        """For people."""
        if self.last is None:
            return f"{show(self.first)} and later (known up to {show(NEWEST_SGLANG)})"
        return f"{show(self.first)} to {show(self.last)}"


def check_entering(entering: tuple[int, ...], num_aux_layers: int, layers: int) -> None:
    """Stop where the ids cannot belong to this drafter and verifier.

    Raises:
        ConfigError: none, not K of them, not ascending, or beyond the verifier's layers.
    """
    if not entering:
        raise ConfigError(
            "found no aux layer ids, expected those of the training data: without them an engine "
            "guesses and accepts next to nothing; give data.aux_layer_ids and its convention"
        )
    if len(entering) != num_aux_layers:
        raise ConfigError(
            f"found {len(entering)} aux layer ids {list(entering)}, expected {num_aux_layers}, as "
            "many as fc reads: the last state, which the loss compares with, is not among them"
        )
    if any(a >= b for a, b in pairwise(entering)) or entering[0] < 0 or entering[-1] > layers:
        raise ConfigError(
            f"found aux layer ids {list(entering)}, expected ascending ones within 0..{layers}, "
            f"the verifier's layers: correct paths.verifier or the ids"
        )


def sglang_ids(entering: tuple[int, ...], verifier: str, layers: int, oldest: Version) -> SglangIds:
    """Nested ids for a verifier class, served by ``oldest`` and as many later releases as can be.

    Args:
        entering: what was trained on, see :func:`check_entering`.
        verifier: first of the ``architectures`` in the verifier's ``config.json``.
        layers: its decoder layers.

    Raises:
        ConfigError: no ids make this release capture these states.
    """
    notes = []
    change = FIRST_SERVED.get(verifier)
    if change is not None and oldest < change.present:
        notes.append(f"SGLang captures layers of {verifier} {change}")
        oldest = change.present
    outputs = tuple(k - 1 for k in entering)
    if verifier == GPT_OSS and entering[-1] == layers:
        return SglangIds(entering, oldest, None, tuple(notes))
    if entering[0] < 1 or entering[-1] >= layers:
        raise ConfigError(
            f"SGLang has no id for states entering layer {entering[0]} .. {entering[-1]} of "
            f"{verifier} with {layers} layers, expected 1..{layers - 1}: train on such layers, or "
            "export for vLLM with target=vllm"
        )
    if verifier in DEEPSEEK_CLASSES and entering[0] != 2:
        return _by_release(entering, outputs, oldest, notes)
    if verifier not in ADD_ONE_CLASSES | DEEPSEEK_CLASSES | {GPT_OSS}:
        notes.append(
            f"{verifier} is not in the table of classes: the rule of most classes (ids + 1) is "
            "taken; compare the acceptance length with the card before long use"
        )
    return SglangIds(outputs, oldest, None, tuple(notes))


def _by_release(
    entering: tuple[int, ...], outputs: tuple[int, ...], oldest: Version, notes: list[str]
) -> SglangIds:
    """A DeepSeek class whose first layer is not 2: releases read the same ids differently."""
    change, other = FIRST_IS_ONE, "SGLang {} reads these layers from {} instead"
    if oldest <= change.absent:
        later = "no ids at all" if entering[0] == 1 else f"{list(entering)}"
        notes.append("no single file serves all releases: " + other.format(change, later))
        return SglangIds(outputs, max(oldest, OLDEST_SGLANG), change.absent, tuple(notes))
    if oldest < change.present:
        raise ConfigError(
            f"min_sglang={show(oldest)}: it is not known how this release reads the ids of states "
            f"entering {list(entering)}: give min_sglang={show(change.present)} and serve with "
            f"that, or {show(change.absent)}"
        )
    if entering[0] == 1:
        raise ConfigError(
            f"no ids make SGLang {show(change.present)} and later capture states entering "
            f"{list(entering)}: a first id of 1 means layer 2 there. Give "
            f"min_sglang={show(change.absent)}, target=vllm, or train on other layers"
        )
    earlier = f"up to {show(change.absent)}"
    notes.append("no single file serves all releases: " + other.format(earlier, list(outputs)))
    return SglangIds(entering, oldest, None, tuple(notes))
