"""All checks in order, of what is set and what is here; and the cheap ones as training starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from eagle3.audit import noise_line
from eagle3.config import Config
from eagle3.data.datamodule import ShardDataModule
from eagle3.errors import ConfigError
from eagle3.inputs import Inputs
from eagle3.names import Accelerator, CaptureSource, Switch
from eagle3.preflighting.drafting import (
    Models,
    judge_parts,
    judge_step,
    load_models,
    sizes_only,
    step_place,
)
from eagle3.preflighting.forecast import (
    MFU,
    Epoch,
    judge_disk,
    judge_memory,
    judge_reading,
    judge_saving,
    judge_steps,
    judge_time,
    planned_rate,
)
from eagle3.preflighting.machine import (
    Device,
    cards_here,
    judge_cards,
    planned_device,
    trains_on_cpu,
)
from eagle3.preflighting.report import Report
from eagle3.preflighting.sources import (
    Sources,
    audit_states,
    epoch_of,
    judge_config,
    judge_coverage,
    measured_read_rate,
    open_sources,
    settle,
)


def preflight(config: Config) -> Report:
    """Everything that can be known now; nothing is written but the index of the documents."""
    report = Report()
    settled = settle(config)
    if not judge_config(report, settled):
        return report
    present = cards_here()
    judge_cards(report, settled, present)
    planned, device = _planned(settled, present), planned_device(settled, present)
    makes_map = config.capture.source is not CaptureSource.off
    sources = open_sources(report, settled, makes_map=makes_map)
    epoch = None if sources.data is None else epoch_of(sources.data, settled)
    if sources.data is not None:
        audit_states(report, settled)
    models = _models(report, planned, sources)
    judge_memory(report, planned, epoch, device)
    judge_disk(report, planned, Path(config.paths.output))
    judge_saving(report, planned)
    if epoch is None:
        report.skip("steps", "the number of steps needs paths.shards")
    else:
        judge_steps(report, planned, epoch)
    tried = _try_step(report, planned, sources, models)
    _judge_pace(report, planned, epoch, device, tried)
    return report


def startup_findings(config: Config, inputs: Inputs, folder: Path) -> Report:
    """What is known without reading or computing anything, of inputs that are already loaded.

    Args:
        folder: of the run, with the checkpoints that it has when it goes on.
    """
    report = Report()
    present = cards_here()
    planned, device = _planned(config, present), planned_device(config, present)
    data = inputs.data
    epoch = epoch_of(data, config) if isinstance(data, ShardDataModule) else None
    judge_parts(report, config, inputs.parameters)
    judge_coverage(report, inputs.vocab, inputs.vocab_coverage)
    judge_memory(report, planned, epoch, device)
    judge_disk(report, planned, folder)
    if epoch is not None:
        judge_steps(report, planned, epoch)
    return report


def check_startup(
    config: Config, inputs: Inputs, folder: Path, say: Callable[[str], None]
) -> Report:
    """Say what :func:`startup_findings` finds, unless ``preflight=off``; what was said, in full.

    Raises:
        ConfigError: something that would stop the run later.
    """
    if config.preflight is Switch.off:
        return Report()
    report = startup_findings(config, inputs, folder)
    for line in report.short_lines():
        say(line)
    if report.stops:
        raise ConfigError(
            "the preflight found reasons not to train, listed above; preflight=off trains anyway"
        )
    return report


def write_json(config: Config, report: Report) -> None:
    """To ``preflight_json``, if it is set."""
    if config.preflight_json is not None:
        report.write(Path(config.preflight_json))


def _planned(config: Config, present: int) -> Config:
    """With the accelerator that ``auto`` will turn out to be."""
    on_cpu = trains_on_cpu(config, present)
    chosen = Accelerator.cpu if on_cpu else Accelerator.gpu
    return replace(config, trainer=replace(config.trainer, accelerator=chosen))


def _models(report: Report, config: Config, sources: Sources) -> Models | None:
    """Judge what is trained: of real models where all is there, else of their sizes."""
    data, vocab = sources.data, sources.vocab
    if sources.verifier is None or data is None or vocab is None:
        judge_parts(report, config, sizes_only(config).rows)
        return None
    kind = data.description.last_hidden
    models = report.attempt("weights", lambda: load_models(config, vocab, kind))
    if models is not None:
        judge_parts(report, config, models.rows)
    return models


def _try_step(
    report: Report, config: Config, sources: Sources, models: Models | None
) -> float | None:
    data = sources.data
    if models is None or data is None:
        report.skip("one step", "needs the verifier, documents and a vocabulary map")
        return None
    place = step_place(report, config)
    if place is None:
        return None
    batch = report.attempt("one step", lambda: data.sample_batch(config.max_seq_len))
    if batch is None:
        return None
    if config.noise_std > 0:
        line = noise_line(batch, config.model.num_aux_layers, config.noise_std)
        report.ok("noise", line.removeprefix("noise: "))
    return judge_step(report, config, models, batch, place)


def _judge_pace(
    report: Report,
    config: Config,
    epoch: Epoch | None,
    device: Device | None,
    tried: float | None,
) -> None:
    """Time and reading at the pace of the card's figures, or else of the step that was tried."""
    rate, assumption = planned_rate(config, epoch, device), ""
    if rate is not None and device is not None:
        assumption = f"assumed: {MFU:.0%} of {device.tflops:,.0f} TFLOP/s of a {device.name}"
    elif tried is not None and config.trainer.accelerator is Accelerator.cpu:
        rate, assumption = tried, "the pace of the one step here"
    if rate is None:
        report.skip("time", "give card=h100 (or another), or try it where the cards are")
        return
    judge_time(report, config, epoch, rate, assumption)
    measured = None if epoch is None else report.attempt(
        "reading", lambda: measured_read_rate(config))  # fmt: skip
    judge_reading(report, config, epoch, rate, measured)
