"""Compare this package with stored reference numbers.

    python tests/golden/check.py CASE.safetensors...

Each case is a ``NAME.safetensors`` beside a ``NAME.json``: weights, batches, losses and gradients
of another EAGLE-3 trainer. Prints the worst error by output, once with every technique of
``conf/compute`` on and once with all off; exits 1 when one misses its tolerance.

The reference shifts whole packs, so near a document's end it trains on the next document's tokens;
we do not. Where such rows exist the reference's own loss without them (``clean.*``) is compared,
and gradients only where ``clean.grad.*`` is stored. Its sliding window counts rows while ours
counts token positions: they agree on rows i with ``i + step < window``, and only those and the
loss of step 0 are compared.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle3.config import ComputeConfig, ModelConfig, RopeConfig
from eagle3.data.batch import PackedBatch
from eagle3.model.drafter import Drafter
from eagle3.model.layers import NormLayout
from eagle3.model.ttt import unroll
from eagle3.model.verifier_head import VerifierHead
from eagle3.names import Arch, LastHidden, Recompute
from eagle3.objective import PackResult, StepResult, row_counts, run_pack, step_weights

LOSS_NAMES = {
    "kl_div": "kl",
    "rkl": "reverse_kl",
    "jsd": "js",
    "ce": "ce",
    "tv": "tv",
    "nla": "nla",
    "lk_hybrid": "lk_hybrid",
}
LOSS_TOLERANCE = 1e-5
"""Relative."""
TENSOR_TOLERANCE = 1e-4
"""Largest difference over the tensor's largest entry."""


COMPUTE = {
    "fast": ComputeConfig(recompute=Recompute.mlp),
    "reference": ComputeConfig.reference(),
}
"""Every technique on, and every technique off."""


@dataclass(frozen=True)
class Comparison:
    """One output against the reference."""

    output: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance


class Case:
    """A stored case, its tensors and its settings."""

    def __init__(self, path: Path) -> None:
        self.tensors = load_file(path)
        self.spec: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
        loss = self.spec["loss"]
        mix = json.loads(loss) if loss.startswith("{") else {loss: 1.0}
        self.mix = [(LOSS_NAMES[name], weight) for name, weight in mix.items()]
        self.ttt_steps = self.spec["ttt_steps"]
        self.decay = self.spec["ttt_step_loss_decay"]

    def model(self) -> tuple[Drafter, VerifierHead]:
        """Drafter and verifier head with the case's weights, ``lm_head`` trainable."""
        layer = self.spec["transformer_layer_config"]
        config = ModelConfig(
            hidden_size=layer["hidden_size"],
            vocab_size=layer["vocab_size"],
            draft_vocab_size=self.spec["draft_vocab_size"],
            intermediate_size=layer["intermediate_size"],
            num_attention_heads=layer["num_attention_heads"],
            num_key_value_heads=layer["num_key_value_heads"],
            head_dim=layer["head_dim"],
            num_aux_layers=self.spec["num_aux_hidden_states"],
            rms_norm_eps=layer["rms_norm_eps"],
            rope=RopeConfig(theta=self.spec["rope_theta"]),
            arch=Arch(self.spec["arch"]),
            sliding_window=self.spec["sliding_window"],
        )
        flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        norms = NormLayout(**{flag: self.spec[flag] for flag in flags})
        drafter = Drafter(config, norms)
        weights = {
            our_name(name.removeprefix("weights.")): tensor
            for name, tensor in self.tensors.items()
            if name.startswith("weights.") and ".verifier_" not in name
        }
        embed = weights.pop("embed_tokens.weight")
        drafter.embed_tokens = embed
        drafter.load_state_dict(weights, strict=True)
        head = VerifierHead(
            self.tensors["weights.verifier_norm.weight"],
            self.tensors["weights.verifier_lm_head.weight"],
            eps=layer["rms_norm_eps"],
            last_hidden=LastHidden.pre_norm,
        )
        return drafter, head

    def batch(self, prefix: str = "batch") -> PackedBatch:
        """The stored collated batch as ours; the next token is not stored and not needed."""
        stored = {
            name: self.tensors[f"{prefix}.{name}"][0]
            for name in (
                "input_ids",
                "hidden_states",
                "verifier_last_hidden_states",
                "loss_mask",
                "document_ids",
                "position_ids",
            )
        }
        documents = stored["document_ids"]
        rows = documents >= 0
        return PackedBatch(
            input_ids=stored["input_ids"],
            next_ids=torch.full_like(documents, -1),
            aux_hidden=stored["hidden_states"],
            last_hidden=stored["verifier_last_hidden_states"],
            loss_mask=stored["loss_mask"].bool(),
            document_ids=documents,
            position_ids=stored["position_ids"],
            start_mask=rows,
            document_lengths=tuple(torch.bincount(documents[rows]).tolist()),
        ).trim()


def our_name(name: str) -> str:
    """Reference parameter name -> ours."""
    return name.replace("layers.0.", "layer.")


def check_case(path: Path, compute: ComputeConfig) -> list[Comparison]:
    """Every comparison this case allows."""
    case = Case(path)
    if "out.losses" in case.tensors:
        return _check_trajectory(case, compute)
    drafter, head = case.model()
    batch = case.batch()
    result = _judge(case, drafter, head, batch, compute)
    counts = row_counts([batch], case.ttt_steps)
    windowed = case.spec["sliding_window"] is not None
    out = _check_forward(case, drafter, head, batch, compute)
    out += _check_step_losses(case, result.steps, counts, steps=1 if windowed else case.ttt_steps)
    if not windowed:
        out.append(_relative("loss", result.loss, case.tensors["clean.loss"]))
        out += _check_gradients(case, drafter, result.loss)
    return out


def _judge(
    case: Case, drafter: Drafter, head: VerifierHead, batch: PackedBatch, compute: ComputeConfig
) -> PackResult:
    counts = row_counts([batch], case.ttt_steps)
    return run_pack(
        drafter,
        head,
        batch,
        batch.aux_hidden,
        ttt_steps=case.ttt_steps,
        mix=case.mix,
        compute=compute,
        weights=step_weights(counts, step_loss_decay=case.decay, world_size=1),
    )


def _check_forward(
    case: Case, drafter: Drafter, head: VerifierHead, batch: PackedBatch, compute: ComputeConfig
) -> list[Comparison]:
    """Targets, fc, and per step hidden states, logits and draft tokens of rows that exist."""
    length, tensors = len(batch), case.tensors
    out = [
        _largest("fc", drafter.fuse(batch.aux_hidden), tensors["mid.fc"][0, :length]),
        _largest("targets", head(batch.last_hidden), tensors["mid.targets"][0, :length]),
    ]
    windowed = case.spec["sliding_window"]
    with torch.no_grad():
        chain = unroll(drafter, batch, batch.aux_hidden, case.ttt_steps, compute)
        for step, hidden in enumerate(chain):
            rows = _rows_inside(batch, step, windowed)
            logits = drafter.logits(hidden[rows])
            stored = tensors[f"mid.logits_{step}"][0, :length][rows]
            out.append(_largest(f"logits_{step}", logits, stored))
            wanted = tensors[f"mid.hidden_{step}"][0, :length][rows]
            out.append(_largest(f"hidden_{step}", hidden[rows], wanted))
            tokens = tensors["out.draft_tokens"][step, 0, :length][rows]
            wrong = float((logits.argmax(-1) != tokens).sum())
            out.append(Comparison(f"draft_tokens_{step}", wrong, 0.0))
    return out


def _rows_inside(batch: PackedBatch, step: int, window: int | None) -> Tensor:
    """Rows i with i + step in their document (and, with a window, before the rules differ)."""
    documents = batch.document_ids
    end = len(batch) - step
    rows = (documents[:end] == documents[step:]).nonzero()[:, 0]
    if window is None or step == 0:
        return rows
    starts = torch.searchsorted(documents, documents[rows])
    return rows[rows - starts + step < window]


def _check_step_losses(
    case: Case, results: list[StepResult], counts: Tensor, steps: int
) -> list[Comparison]:
    out = []
    for step in range(steps):
        ours = case.decay**step * results[step].losses.sum() / counts[step].clamp(min=1)
        out.append(_relative(f"loss_{step}", ours, case.tensors[f"clean.loss_{step}"]))
    return out


def _check_gradients(case: Case, drafter: Drafter, loss: Tensor) -> list[Comparison]:
    crossing = sum(case.spec["result"]["terms_crossing_documents"])
    prefix = "clean.grad." if crossing else "grad."
    stored = {
        our_name(name.removeprefix(prefix)): tensor
        for name, tensor in case.tensors.items()
        if name.startswith(prefix)
    }
    loss.backward()
    found = {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
    if stored:
        assert found.keys() == stored.keys(), found.keys() ^ stored.keys()
    return [_largest(f"grad.{name}", found[name], grad) for name, grad in stored.items()]


def _check_trajectory(case: Case, compute: ComputeConfig) -> list[Comparison]:
    """Twenty AdamW steps; the stored rates are used, weight decay falls on everything."""
    drafter, head = case.model()
    trained = {our_name(name) for name in case.spec["trained_parameters"]}
    for name, parameter in drafter.named_parameters():
        parameter.requires_grad_(name in trained)
    recipe = case.spec["optimizer"]
    optimizer = torch.optim.AdamW(
        [p for p in drafter.parameters() if p.requires_grad],
        betas=tuple(recipe["betas"]),
        eps=recipe["eps"],
        weight_decay=recipe["weight_decay"],
    )
    losses, norms = [], []
    for step in range(recipe["steps"]):
        batch = case.batch(f"batch{step % 4}")
        loss = _judge(case, drafter, head, batch, compute).loss
        optimizer.zero_grad()
        loss.backward()
        limit = recipe["clip_grad_norm"] or float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(drafter.parameters(), limit)))
        optimizer.param_groups[0]["lr"] = float(case.tensors["out.lrs"][step])
        optimizer.step()
        losses.append(float(loss.detach()))
    out = [
        _worst_relative("losses", torch.tensor(losses), case.tensors["out.losses"]),
        _worst_relative("grad_norms", torch.tensor(norms), case.tensors["out.grad_norms"], 1e-4),
    ]
    weights = drafter.state_dict()
    for name in case.spec["trained_parameters"]:
        final = case.tensors[f"final.{name}"]
        out.append(_largest(f"final.{our_name(name)}", weights[our_name(name)], final))
    return out


def _relative(output: str, ours: Tensor, stored: Tensor) -> Comparison:
    return _worst_relative(output, ours.detach().reshape(1), stored)


def _worst_relative(
    output: str, ours: Tensor, stored: Tensor, tolerance: float = LOSS_TOLERANCE
) -> Comparison:
    error = (ours.double() - stored.double()).abs() / stored.double().abs().clamp(min=1e-30)
    return Comparison(output, float(error.max()), tolerance)


def _largest(output: str, ours: Tensor, stored: Tensor) -> Comparison:
    if stored.numel() == 0:
        return Comparison(output, 0.0, TENSOR_TOLERANCE)
    error = (ours.detach() - stored).abs().max() / stored.abs().max().clamp(min=1e-30)
    return Comparison(output, float(error), TENSOR_TOLERANCE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="+", type=Path, metavar="CASE.safetensors")
    failed = False
    for path, name in itertools.product(parser.parse_args().cases, COMPUTE):
        comparisons = check_case(path, COMPUTE[name])
        missed = [c for c in comparisons if not c.ok]
        failed |= bool(missed)
        print(f"{'FAIL' if missed else 'ok'}  {path.stem}, compute={name}")
        for c in comparisons:
            mark = " " if c.ok else "!"
            print(f"  {mark} {c.output:<44} worst error {c.error:.2e}, limit {c.tolerance:.0e}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
