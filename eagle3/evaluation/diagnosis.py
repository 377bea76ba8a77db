"""Why a server accepts next to nothing: the known causes, the most frequent first.

An engine says nothing when it serves a wrong drafter: output is right, since the verifier decides,
and only the acceptance length stays near 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

NEAR_ONE = 1.05
"""Acceptance length at or below which a drafter does nothing."""

CAUSES = (
    (
        "tensors under names the engine does not know",
        "SGLang drops them without a word: names must have no prefix (draft_model., model., "
        "module., _orig_mod.), the layer must be midlayer.*",
    ),
    (
        "no lm_head.weight in the file",
        "the engine then serves a head of random or of wrong rows; it must always be shipped",
    ),
    (
        "other layers captured than trained on",
        "compare the log line about auxiliary layers with the card: SGLang counts outputs (+1), "
        "vLLM entering states, and the rule of SGLang differs by version and verifier class",
    ),
    (
        "the algorithm EAGLE instead of EAGLE3",
        "SGLang then captures no layer: --speculative-algorithm EAGLE3; vLLM: method eagle3",
    ),
    (
        "d2t missing, or absolute ids in it",
        "a reduced draft vocabulary needs d2t as offsets; --speculative-token-map is not read",
    ),
    (
        "norm flags lost",
        "norm_before_residual, norm_before_fc, fc_norm and norm_output must be what was trained; "
        "SGLang never reads norm_before_residual",
    ),
    (
        "another rope",
        "theta and scaling stand in two places of config.json and must agree",
    ),
    (
        "another verifier or quantisation than captured",
        "states of another checkpoint, or of weights quantised otherwise, are other features",
    ),
    (
        "prompts longer than trained",
        "acceptance falls to 1 beyond the trained length; compare on short prompts",
    ),
)


def diagnosis(acceptance_length: float, export_dir: Path | None) -> list[str]:
    """Lines about a server with this acceptance length; none where it is well above 1."""
    if math.isnan(acceptance_length):
        return [
            "the server reports no drafting: it was started without speculation, or an engine too "
            "old to say it. Start it with serve_sglang.sh or serve_vllm.sh of the export"
        ]
    if acceptance_length > NEAR_ONE:
        return []
    lines = [f"acceptance length {acceptance_length:.2f}: the drafter does nothing. Known causes:"]
    lines += [f"  {n}. {cause}: {check}" for n, (cause, check) in enumerate(CAUSES, 1)]
    return lines + list(_checked(export_dir))


def _checked(export_dir: Path | None) -> Iterator[str]:
    if export_dir is None:
        yield "give export_dir=DIR, and what the file itself can tell is checked"
        return
    from eagle3.serving.independent_reader import problems

    found = problems(export_dir)
    for problem in found:
        yield f"  found in {export_dir}: {problem}"
    if not found:
        yield f"  {export_dir} itself holds what an engine needs: look at 3, 4 and 8 first"
