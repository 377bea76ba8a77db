"""The files for people: model card and serve scripts."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle3 import __version__
from eagle3.names import ExportTarget
from eagle3.serving.config import ExportConfig
from eagle3.serving.plan import ExportPlan, longest_trained
from eagle3.serving.proof import Check
from eagle3.serving.source import ExportSource
from eagle3.serving.versions import show

SERVE_SGLANG, SERVE_VLLM = "serve_sglang.sh", "serve_vllm.sh"
_METRICS = ("val/acceptance_replay", "val/acceptance_pooled", "val/accuracy", "val/loss")
_MEANING = {
    "val/acceptance_replay": "tokens per verifier pass, bonus token included, by replayed rounds",
    "val/acceptance_pooled": "1 + sum of the shares of rows whose first s draft tokens are right",
    "val/accuracy": "share of rows whose first draft token is the verifier's",
    "val/loss": "mean distillation loss over the TTT steps",
}


def scripts(source: ExportSource, plan: ExportPlan, settings: ExportConfig) -> dict[str, str]:
    """File name to shell script, for the engines that can load the export."""
    verifier, tokens = _verifier(plan.verifier_name), settings.num_speculative_tokens
    found = {}
    if plan.sglang is not None:
        found[SERVE_SGLANG] = _sglang(verifier, tokens, plan.sglang.releases)
    if plan.target is not ExportTarget.sglang:
        found[SERVE_VLLM] = _vllm(verifier, tokens, settings.min_vllm)
    return found


def _verifier(name: str) -> str:
    """The variable VERIFIER, or the recorded name where that can be loaded from."""
    if "/" in name:
        return f"verifier=${{VERIFIER:-{shlex.quote(name)}}}"
    return f"verifier=${{VERIFIER:?set VERIFIER to the directory or hub name of {_word(name)}}}"


def _word(name: str) -> str:
    """Without what a shell would act on."""
    return re.sub(r"[^\w.-]", "_", name)


def _sglang(verifier: str, tokens: int, releases: str) -> str:
    return f"""#!/usr/bin/env bash
# SGLang {releases}.
# The algorithm is EAGLE3: with EAGLE no layer is captured and nothing is accepted.
# The drafter has plain attention: should the server stop at a backend that only serves MLA, add
#   --speculative-draft-attention-backend triton
# Give what the verifier needs beside (--tp 8, --trust-remote-code, ...) as arguments.
set -euo pipefail
{verifier}
exec python -m sglang.launch_server \\
  --model-path "$verifier" \\
  --speculative-algorithm EAGLE3 \\
  --speculative-draft-model-path "$(cd "$(dirname "$0")" && pwd)" \\
  --speculative-num-steps {tokens} \\
  --speculative-eagle-topk 1 \\
  --speculative-num-draft-tokens {tokens + 1} \\
  "$@"
"""


def _vllm(verifier: str, tokens: int, oldest: str) -> str:
    setting = json.dumps(
        {"method": "eagle3", "model": "@", "num_speculative_tokens": tokens}, separators=(",", ":")
    )
    before, after = setting.split("@")
    return f"""#!/usr/bin/env bash
# vLLM {oldest} or later. Give what the verifier needs beside (--tensor-parallel-size 8,
# --trust-remote-code, ...) as arguments.
set -euo pipefail
{verifier}
drafter="$(cd "$(dirname "$0")" && pwd)"
exec vllm serve "$verifier" \\
  --speculative-config '{before}'"$drafter"'{after}' \\
  "$@"
"""


def card(
    source: ExportSource, plan: ExportPlan, settings: ExportConfig, checks: Sequence[Check]
) -> str:
    """The model card, Markdown."""
    title = "EAGLE-3 drafter" if source.step is not None else "Untrained EAGLE-3 drafter"
    parts = [
        f"# {title} for {plan.verifier_name}",
        "\n".join(_facts(source, plan)),
        "## Mind\n\n" + "\n".join(f"- {line}" for line in _mind(plan, settings)),
        "## Acceptance on held-out documents\n\n" + "\n".join(_metric_lines(source)),
        "## Training data\n\n" + "\n".join(_data_lines(source)),
        "## Proof\n\nChecked when this directory was written:\n\n"
        + "\n".join(["| check | found |", "|---|---|", *(_check_row(check) for check in checks)]),
        "## Settings of the run\n\n```json\n" + _settings(source) + "\n```",
    ]
    return "\n\n".join(parts) + "\n"


def provenance(source: ExportSource, plan: ExportPlan) -> dict[str, Any]:
    """``export.json``: the card's facts for programs."""
    return {
        "eagle3": __version__,
        "source": source.label,
        "step": source.step,
        "run_id": source.recorded.get("run_id"),
        "data_fingerprint": source.recorded.get("data_fingerprint"),
        "target": str(plan.target),
        "serves": list(plan.serves),
        "aux_layers_entering": list(source.aux_layer_ids),
        "verifier": plan.verifier_name,
        "verifier_class": source.verifier.architecture,
        "verifier_quantization": source.verifier.quantization,
        "longest_trained": longest_trained(source),
        "metrics": _metrics(source),
    }


def _facts(source: ExportSource, plan: ExportPlan) -> Iterator[str]:
    verifier, longest = source.verifier, longest_trained(source)
    kind = f"{verifier.architecture}, {verifier.num_layers} layers"
    yield f"- verifier: {plan.verifier_name} ({kind})"
    yield f"- served by: {'; '.join(plan.serves)}"
    yield f"- reads the states entering layers {list(source.aux_layer_ids)}"
    if plan.sglang is not None:
        yield f"- SGLang ids (nested): {list(plan.sglang.ids)}, for {plan.sglang.releases}"
    vocab = source.vocab
    yield f"- draft vocabulary: {vocab.draft_size:,} of {vocab.verifier_size:,} tokens"
    on = [name for name, value in vars(source.norms).items() if value]
    yield f"- norms beyond plain EAGLE-3: {', '.join(on) or 'none'}"
    limit = source.config.model.max_position_embeddings
    trained = "not recorded" if longest is None else f"{longest:,} tokens"
    yield f"- max_position_embeddings: {limit:,}; longest trained context: {trained}"
    yield f"- states captured from {verifier.quantization or 'unquantised'} weights"


def _mind(plan: ExportPlan, settings: ExportConfig) -> Iterator[str]:
    yield from plan.warnings
    if "embed_tokens.weight" not in plan.tensors and settings.embeddings == "omit":
        yield "no embedding in the file: both engines share the verifier's"
    if plan.sglang is not None and settings.min_sglang != show(plan.sglang.first):
        yield f"not for SGLang {settings.min_sglang}, although that was asked for"
    if plan.target is ExportTarget.speculators:
        yield (
            "vllm serve DIR alone works where the verifier's name is that of a hub; with a local "
            "verifier use serve_vllm.sh"
        )
    yield "a server that accepts 1.0 tokens a pass serves something else: look at the proof below"


def _metrics(source: ExportSource) -> dict[str, float]:
    """Of the latest validation; one without rows has no number, which JSON cannot say."""
    recorded = source.recorded.get("metrics", {})
    return {name: value for name, value in recorded.items() if math.isfinite(value)}


def _metric_lines(source: ExportSource) -> Iterator[str]:
    metrics = _metrics(source)
    if not metrics:
        yield "None recorded."
        return
    yield "| metric | value | meaning |"
    yield "|---|---|---|"
    rest = sorted(name for name in metrics if name not in _METRICS)
    for name in [*(n for n in _METRICS if n in metrics), *rest]:
        yield f"| {name} | {metrics[name]:.4f} | {_MEANING.get(name, '')} |"


def _data_lines(source: ExportSource) -> Iterator[str]:
    recorded = source.recorded
    yield f"- fingerprint of the documents: {recorded.get('data_fingerprint', 'none')}"
    yield f"- optimizer steps: {source.step if source.step is not None else 'none'}"
    for captured in recorded.get("captured_from", ()):
        yield f"- captured from {captured['name']}, quantisation: {captured['quantization']}"
    lengths = recorded.get("lengths")
    if lengths is not None:
        yield f"- {lengths['documents']:,} documents, the longest {lengths['longest_document']:,}"
        yield "- tokens of a document: " + ", ".join(
            f"{name}: {count:,}" for name, count in lengths["histogram"].items()
        )


def _check_row(check: Check) -> str:
    return f"| {check.name} | {check.found.replace('|', '/')} |"


def _settings(source: ExportSource) -> str:

    settings = asdict(source.config)
    for left_out in ("paths", "logger"):  # of one machine
        del settings[left_out]
    return json.dumps(settings, indent=1, default=str)


def write_text_files(
    directory: Path,
    source: ExportSource,
    plan: ExportPlan,
    settings: ExportConfig,
    checks: Sequence[Check],
) -> None:
    """Card, scripts and ``export.json``."""
    (directory / "README.md").write_text(card(source, plan, settings, checks), encoding="utf-8")
    facts = json.dumps(provenance(source, plan), indent=2)
    (directory / "export.json").write_text(facts + "\n", encoding="utf-8")
    for name, text in scripts(source, plan, settings).items():
        path = directory / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
