"""One run on one rank: load, check, train, validate, report."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
import warnings
from functools import partial
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback

from eagle3.callbacks import (
    AtomicCheckpointIO,
    CheckpointPolicy,
    EarlyStop,
    Progress,
    Throughput,
    ValidationSchedule,
)
from eagle3.callbacks.health import Health
from eagle3.callbacks.health_alerts import AlertKind, Alerts
from eagle3.callbacks.stop_signals import StopSignals
from eagle3.callbacks.tables import Tables
from eagle3.checks import accumulate
from eagle3.config import RESUME_AUTO, Config
from eagle3.distributed import (
    Ranks,
    lost_peer,
    ranks_from_environment,
)
from eagle3.inputs import Inputs, load_inputs
from eagle3.log_lines import show_log_lines
from eagle3.loggers import Loggers, start_loggers
from eagle3.module import DrafterModule
from eagle3.names import Precision
from eagle3.optim import LrSchedule
from eagle3.outcome import Ended, report_outcome
from eagle3.placement import cluster_environment, placement
from eagle3.preflighting.command import check_startup
from eagle3.preflighting.report import Report
from eagle3.provenance import Run
from eagle3.resume import only_process_in
from eagle3.run_folder import EARLY_STOP, FINISHED, INTERRUPTED, MAX_STEPS, checkpoints
from eagle3.serving.recorded import export_facts
from eagle3.slurm import requeue
from eagle3.token_text import decoder


def fit(config: Config, run: Run) -> float:
    """Train as one rank of ``run``; returns the best ``val/acceptance_replay``.

    The W&B run is finished with the right exit code also when something raises.

    Raises:
        SystemExit: with EX_TEMPFAIL (75), when a signal stopped the run, which is saved then.
    """
    quiet_lightning()
    if run.is_main:
        show_log_lines()
    signals = StopSignals()
    with only_process_in(run):
        loggers = start_loggers(config, run)
        try:
            result = _fit(config, run, loggers, signals)
        except SystemExit:
            loggers.finish(exit_code=os.EX_TEMPFAIL)
            if run.is_main and config.resume == RESUME_AUTO:
                requeue(os.environ)
            raise
        except BaseException:
            loggers.finish(exit_code=1)
            raise
        finally:
            signals.restore()
        loggers.finish(exit_code=0)
    return result


def _fit(config: Config, run: Run, loggers: Loggers, signals: StopSignals) -> float:
    say = print if run.is_main else _say_nothing
    ranks = ranks_from_environment() or Ranks()
    lightning.seed_everything(config.seed, verbose=False)
    where = placement(config)
    precision = resolve_precision(config, where["accelerator"])
    say(f"run folder: {run.directory}")
    inputs = load_inputs(config, run, ranks, where["accelerator"], precision, say)
    schedule = LrSchedule.from_config(config.optim, config.lr, inputs.total_steps)
    for line in plan_lines(config, inputs, schedule, ranks):
        say(line)
    startup = check_startup(config, inputs, run.directory, say)
    module = DrafterModule(
        config,
        inputs.drafter,
        inputs.head,
        schedule,
        _provenance(config, run, inputs),
        tokens_lost=inputs.data.tokens_lost,
        sources=inputs.data.sources,
    )
    policy = checkpoint_policy(config, run, signals, loggers)
    trainer = lightning.Trainer(
        **where,
        precision="bf16-mixed" if precision is Precision.bf16_mixed else "32-true",
        max_epochs=inputs.epochs,
        max_steps=config.trainer.max_steps or -1,
        logger=loggers.lightning or False,
        callbacks=[policy, *build_callbacks(config, run, inputs, startup, schedule, loggers)],
        plugins=[AtomicCheckpointIO(), cluster_environment()],
        log_every_n_steps=config.trainer.log_every_steps,
        default_root_dir=run.directory,
        reload_dataloaders_every_n_epochs=1,
        num_sanity_val_steps=0,
        inference_mode=False,  # or training could not go on with the sums of _score_start
        limit_val_batches=1.0 if inputs.data.val_report.documents else 0,
        enable_checkpointing=False,  # the policy saves
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    started = time.monotonic()
    try:
        _score_start(config, run, trainer, module, inputs)
        trainer.fit(module, datamodule=inputs.data, ckpt_path=run.checkpoint, weights_only=True)
    except BaseException as error:
        reason = exit_reason(error, trainer)
        if isinstance(error, SystemExit):
            signals.install()  # a scheduler that sends its signal again must not cut the report
        ended = Ended(reason, time.monotonic() - started, module.skipped_steps)
        with contextlib.suppress(OSError):  # a full disk must not hide why the run ended
            report_outcome(config, run, loggers, trainer, inputs, ended, policy, say)
        if isinstance(error, SystemExit) and error.code != os.EX_TEMPFAIL:
            raise KeyboardInterrupt from None  # which Lightning turns into an exit code of 1
        if isinstance(error, SystemExit):
            say(how_to_go_on(policy))
        raise
    reason = exit_reason(None, trainer)
    ended = Ended(reason, time.monotonic() - started, module.skipped_steps)
    return report_outcome(config, run, loggers, trainer, inputs, ended, policy, say)


def _score_start(
    config: Config, run: Run, trainer: lightning.Trainer, module: DrafterModule, inputs: Inputs
) -> None:
    """Validate a drafter that was trained before, so that step 0 shows what it brings along."""
    if config.paths.init is None or run.checkpoint is not None:
        return
    if inputs.data.val_report.documents:
        trainer.validate(module, datamodule=inputs.data, verbose=False)


def exit_reason(error: BaseException | None, trainer: lightning.Trainer) -> str:
    """Why training ended: one of those in :mod:`eagle3.run_folder`, or the error."""
    if error is None:
        if trainer.should_stop:
            return EARLY_STOP
        stopped = trainer.max_steps > 0 and trainer.global_step >= trainer.max_steps
        return MAX_STEPS if stopped else FINISHED
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return INTERRUPTED
    if lost_peer(error):
        return "error: another rank ended"
    return f"error: {type(error).__name__}"


def how_to_go_on(policy: CheckpointPolicy) -> str:
    """One line for a run that a signal has stopped."""
    newest = policy.newest()
    if newest is None:
        return "stopped by a signal; nothing could be saved"
    return (
        f"stopped by a signal, all is saved (exit code {os.EX_TEMPFAIL}): go on with the same "
        f"command and resume=auto, or resume={newest}"
    )


def resolve_precision(config: Config, accelerator: str) -> Precision:
    """``auto``: bfloat16 autocast on a GPU, float32 on CPU, where it measured faster."""
    if config.trainer.precision is not Precision.auto:
        return config.trainer.precision
    return Precision.bf16_mixed if accelerator == "gpu" else Precision.float32


def plan_lines(config: Config, inputs: Inputs, schedule: LrSchedule, ranks: Ranks) -> list[str]:
    """Steps, warmup and tokens per step, for a last look before hours of training."""
    packs = accumulate(config, ranks.world_size) * ranks.world_size
    return [
        f"plan: {schedule.total_steps:,} optimizer steps in {inputs.epochs} epochs "
        f"({inputs.data.steps_in_epoch(0):,} in the first), {schedule.warmup_steps:,} warmup",
        f"tokens per step: {packs * config.max_seq_len:,} rows at most ({packs} packs of "
        f"{config.max_seq_len:,} over {ranks.world_size} rank(s)), peak lr {config.lr:g}, "
        f"{config.optim.schedule} schedule",
    ]


def checkpoint_policy(
    config: Config, run: Run, signals: StopSignals, loggers: Loggers
) -> CheckpointPolicy:
    """What is saved of this run, and when."""
    return CheckpointPolicy(
        checkpoints(run.directory),
        every_steps=config.trainer.checkpoint_every_steps,
        every_minutes=config.trainer.checkpoint_every_minutes,
        keep_last=config.trainer.keep_last,
        signals=signals,
        logged_rows=loggers.rows,
    )


def build_callbacks(
    config: Config,
    run: Run,
    inputs: Inputs,
    startup: Report,
    schedule: LrSchedule,
    loggers: Loggers,
) -> list[Callback]:
    """Throughput, progress, health and validation; the order matters to progress."""
    alerts = Alerts(loggers.wandb_run)
    throughput = Throughput(
        schedule.total_steps,
        inputs.data.steps_in_epoch(0),
        warn=partial(alerts.send, AlertKind.data_wait),
    )
    validation = ValidationSchedule(config.val.every_steps, schedule.total_steps)
    tables = Tables(run.directory, decoder(inputs.verifier), inputs.parameters, startup)
    progress = Progress(throughput, inputs.epochs)
    health = Health(
        config.health, run.directory, throughput, alerts, clip_norm=config.optim.clip_norm
    )
    callbacks = [throughput, progress, health, validation, tables]
    if config.val.early_stop is not None:
        callbacks.append(EarlyStop(config.val.early_stop, config.val.patience))
    return callbacks


def _provenance(config: Config, run: Run, inputs: Inputs) -> dict[str, Any]:
    """Plain values that a checkpoint needs to be understood without its run folder."""
    description = inputs.data.description
    return {
        "config": _plain(dataclasses.asdict(config)),
        "aux_layer_ids": list(description.aux_layer_ids),
        "last_hidden": str(description.last_hidden),
        "data_fingerprint": description.fingerprint,
        "run_id": run.id,
        **export_facts(
            inputs.verifier,
            inputs.data.settings.directories,
            inputs.data.document_lengths,
            config.max_seq_len,
        ),
    }


def _plain(value: Any) -> Any:
    """Enums as strings, so that nothing but plain types is pickled."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, str) else value


def quiet_lightning() -> None:
    """Lightning's hints are for users of Lightning; warnings of the run still come through."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    # Lightning's use of a torch interface that is on its way out; nothing a user can mend.
    warnings.filterwarnings("ignore", message=r".*LeafSpec.* is deprecated")
    # The data module keeps the position itself, see eagle3/data/position.py.
    warnings.filterwarnings("ignore", message=r"You're resuming from a checkpoint that ended")
    # Every figure is reduced before it is logged, see the module and the metrics.
    warnings.filterwarnings("ignore", message=r"It is recommended to use .*sync_dist=True")


def _say_nothing(_: str) -> None:
    """Ranks other than the first are silent."""
