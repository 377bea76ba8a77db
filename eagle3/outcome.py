"""The end of a run: references on the same rows, summary, curves, and five lines to read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning

from eagle3.callbacks import CheckpointPolicy
from eagle3.checks import accumulate
from eagle3.config import Config
from eagle3.inputs import Inputs, Say
from eagle3.loggers import Loggers
from eagle3.provenance import PROVENANCE_FILE, Run
from eagle3.references import compare_references
from eagle3.report import Facts, verdict, write_report
from eagle3.run_folder import COMPLETE, CURVES_FILE, read_json

_REFERENCE_TOKENS = 2_000_000


@dataclass(frozen=True)
class Ended:
    """How training ended."""

    reason: str
    seconds: float
    skipped_steps: int

    @property
    def complete(self) -> bool:
        """Not cut short: only then are references worth their seconds."""
        return self.reason in COMPLETE


def report_outcome(
    config: Config,
    run: Run,
    loggers: Loggers,
    trainer: lightning.Trainer,
    inputs: Inputs,
    ended: Ended,
    best: CheckpointPolicy,
    say: Say,
) -> float:
    """Write the report on the main rank; returns the best ``val/acceptance_replay`` (0 if none)."""
    if run.is_main:
        facts = _facts(config, run, trainer, inputs, ended, best)
        summary = write_report(run.directory, facts)
        loggers.summary(_flat(summary))
        for line in verdict(summary):
            say(line)
        say(f"curves:   {run.directory / CURVES_FILE}")
    return best.best_value or 0.0


def _facts(
    config: Config,
    run: Run,
    trainer: lightning.Trainer,
    inputs: Inputs,
    ended: Ended,
    best: CheckpointPolicy,
) -> Facts:
    git = read_json(run.directory, PROVENANCE_FILE)["git"]
    accelerator = "cpu" if trainer.strategy.root_device.type == "cpu" else "gpu"
    packs = trainer.world_size * accumulate(config, trainer.world_size)
    return Facts(
        name=run.name,
        exit_reason=ended.reason,
        tokens_per_step=packs * config.max_seq_len,
        total_steps=inputs.total_steps,
        draft_steps=config.val.draft_steps,
        accelerator=accelerator,
        device_hours=ended.seconds / 3600 * trainer.world_size,
        data_fingerprint=inputs.data.description.fingerprint,
        vocab_coverage=inputs.vocab_coverage,
        git_revision=git["revision"],
        git_dirty=git["dirty"],
        bad_samples=inputs.data.bad_samples,
        best_checkpoint=None if best.best_path is None else str(best.best_path),
        skipped_steps=ended.skipped_steps,
        references=validation_references(config, inputs) if ended.complete else {},
    )


def validation_references(config: Config, inputs: Inputs) -> dict[str, dict[str, float]]:
    """Cheap drafters on the validation rows; none where validation is too large for them."""
    validation = inputs.data.validation_tokens(_REFERENCE_TOKENS)
    if not validation:
        return {}
    training = inputs.data.training_tokens(_REFERENCE_TOKENS)
    found = compare_references(training, validation, config.val.draft_steps)
    return {
        reference.name: {
            "accuracy": reference.accuracy,
            "acceptance": reference.acceptance_replay,
        }
        for reference in found
    }


def _flat(summary: dict[str, Any]) -> dict[str, Any]:
    """The summary without nested values, for W&B."""
    return {key: value for key, value in summary.items() if not isinstance(value, dict | list)}
