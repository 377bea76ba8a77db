"""The validation of a training run once more, or of a foreign head: same rows, same figures."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import lightning

from eagle3.config import Config
from eagle3.distributed import Ranks
from eagle3.errors import DataError
from eagle3.fit import quiet_lightning, resolve_precision
from eagle3.inputs import Inputs, Say, load_inputs
from eagle3.module import DrafterModule
from eagle3.names import Precision
from eagle3.optim import LrSchedule
from eagle3.outcome import validation_references
from eagle3.placement import placement
from eagle3.provenance import Run


@dataclass(frozen=True)
class HeldOut:
    """Figures on the validation rows, and what they were computed with."""

    figures: dict[str, float]
    """Under the dashboard's names, ``val/...``."""
    references: dict[str, dict[str, float]]
    """Cheap drafters on the same rows: accuracy and acceptance length."""
    num_documents: int
    inputs: Inputs


def evaluate_held_out(config: Config, out: Path, say: Say) -> HeldOut:
    """Validate the drafter of ``paths.init`` as its training run does.

    Args:
        config: of that run, as :func:`eagle3.evaluation.settings.evaluation_config` makes it.
        out: takes the list of validation documents and the vocabulary map in use.

    Raises:
        DataError: no document is held out, or what :func:`eagle3.inputs.load_inputs` raises.
    """
    quiet_lightning()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # it warns of no training loop
    lightning.seed_everything(config.seed, verbose=False)
    where = placement(config)
    precision = resolve_precision(config, where["accelerator"])
    run = Run(out, out.name, out.name, out.parent.name)
    inputs = load_inputs(config, run, Ranks(), where["accelerator"], precision, say)
    report = inputs.data.val_report
    if not report.documents:
        raise DataError(
            "found no held-out document, expected some to judge the drafter on: raise "
            f"data.val_ratio (it is {config.data.val_ratio:g}), or give paths.val_shards"
        )
    schedule = LrSchedule.from_config(config.optim, config.lr, 1)
    module = DrafterModule(
        config, inputs.drafter, inputs.head, schedule, {}, sources=inputs.data.sources
    )
    trainer = lightning.Trainer(
        **where,
        precision="bf16-mixed" if precision is Precision.bf16_mixed else "32-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=out,
    )
    say(f"judging {report.documents:,} held-out documents in {report.packs:,} packs")
    (found,) = trainer.validate(module, datamodule=inputs.data, verbose=False)
    figures = {name: float(value) for name, value in found.items()}
    return HeldOut(figures, validation_references(config, inputs), report.documents, inputs)
