"""What a run will take: memory, disk, steps, time and reading; from sizes and lengths alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from eagle3.checks import device_count
from eagle3.config import Config
from eagle3.data.disk import free_bytes, size
from eagle3.data.plan import PackingReport
from eagle3.names import Accelerator, Recompute
from eagle3.optim import LrSchedule
from eagle3.planning import PackRows, Step, longest_max_seq_len, plan, work
from eagle3.planning.saving import SAVING_SHARE, pause_s
from eagle3.preflighting.machine import CARDS, GB, Device
from eagle3.preflighting.report import Report
from eagle3.run_folder import checkpoints

MFU = 0.4
"""Share of a card's stated speed that training is assumed to reach; not measured."""
STATE_BYTES = 2
_FULL_PACK = 0.75
_CLIPPED = 0.05
"""Share of the supervised rows, above which it is worth a word."""
_ROWS_MULTIPLE = 128
_SLOW_DISK = 200_000_000
"""Bytes a second that a shared disk may write."""


@dataclass(frozen=True)
class Epoch:
    """The training documents, packed."""

    packing: PackingReport
    """Of the first epoch."""
    total_steps: int
    """Optimizer steps of the run."""
    worst_share: float
    """Supervised rows over all rows of the pack that has most."""
    longest_document: int
    """Tokens that are trained of it."""
    value_bytes: int = STATE_BYTES
    """Of a captured value."""

    @property
    def rows(self) -> int:
        """Rows laid in an epoch."""
        return round(self.packing.fill * self.packing.packs * self.packing.max_seq_len)

    @property
    def document_rows(self) -> int:
        """Mean of those that are trained, at most a pack."""
        mean = self.rows // max(self.packing.documents, 1)
        return max(min(mean, self.packing.max_seq_len), 1)


def judge_memory(
    report: Report, config: Config, epoch: Epoch | None, device: Device | None
) -> None:
    """The plan of a rank's memory, beside what its device has."""
    share = 1.0 if epoch is None else min(epoch.worst_share, 1.0)
    planned = plan(config, None if device is None else device.num_bytes, supervised_share=share)
    report.tables.append(planned.lines())
    report.facts["memory_bytes"] = planned.total_bytes
    needed = f"{size(planned.total_bytes)} at max_seq_len={config.max_seq_len}"
    if device is None:
        report.tables.append(_longest_by_card(config, share))
        report.skip("memory", f"{needed} are planned; give card=h100 (or another) to compare")
        return
    report.facts["device_bytes"] = device.num_bytes
    longest = longest_max_seq_len(config, device.num_bytes, supervised_share=share)
    report.facts["longest_max_seq_len"] = longest
    has = f"{needed} are planned, {device.name} has {size(device.num_bytes)} a rank"
    if planned.fits:
        report.ok("memory", f"{has}; longest max_seq_len {longest:,}")
        return
    if (
        config.trainer.accelerator is Accelerator.cpu
    ):  # what is available may change, and be swapped
        report.warn("memory", has, "close other programs, or set a smaller max_seq_len")
        return
    ways = [f"max_seq_len={longest}"] if longest else []
    again = replace(config, compute=replace(config.compute, recompute=Recompute.mlp))
    if plan(again, device.num_bytes, supervised_share=share).fits:
        ways.append("compute.recompute=mlp")
    action = f"set {' or '.join(ways)}" if ways else "train on a larger card"
    report.stop("memory", has, f"{action} (a plan, not a measurement: preflight=off passes it by)")


def _longest_by_card(config: Config, share: float) -> list[str]:
    return ["longest max_seq_len"] + [
        f"{f'{card.name}, {card.num_bytes / GB:.0f} GB':<32} "
        f"{longest_max_seq_len(config, card.num_bytes, supervised_share=share):>9,}"
        for card in CARDS.values()
    ]


def checkpoint_bytes(config: Config) -> int:
    """Weights in float32 and optimizer states; the embedding is not saved."""
    saved = ("weights", "optimizer states")
    whole = plan(config, world_size=1)  # a checkpoint has the parts of all ranks
    return sum(part.num_bytes for part in whole.resident if part.name in saved)


def judge_disk(
    report: Report, config: Config, folder: Path, free_at: Callable[[Path], int] = free_bytes
) -> None:
    """Checkpoints beside the free space around ``folder``; those that lie in it are replaced."""
    one, kept = checkpoint_bytes(config), config.trainer.keep_last
    # The best beside the newest ones, and one that is being written.
    needed, free = one * (kept + 2), free_at(folder)
    held = sum(path.stat().st_size for path in checkpoints(folder).glob("*.ckpt"))
    report.facts["checkpoint_bytes"], report.facts["free_bytes"] = one, free
    reason = (
        f"a checkpoint is {size(one)}; {kept} newest, the best and one in writing take "
        f"{size(needed)}, {size(free)} are free at {folder}"
        + (f", {size(held)} are taken by earlier ones" if held else "")
    )
    if needed <= free + held:
        report.ok("disk", reason)
        return
    fewer = "" if kept == 1 else ", or trainer.keep_last=1"
    report.stop("disk", reason, f"free some, or set paths.output=/on/another/disk{fewer}")


def judge_saving(report: Report, config: Config) -> None:
    """Checkpoints by time: how often, and how slow a disk makes them rarer; no disk is measured."""
    minutes = config.trainer.checkpoint_every_minutes
    if minutes is None:
        return
    one, wanted = checkpoint_bytes(config), 60 * minutes
    needed = one / (wanted * SAVING_SHARE / (1 - SAVING_SHARE))
    slow = pause_s(wanted, one / _SLOW_DISK)
    report.facts |= {"save_bytes_per_s": needed, "save_minutes_on_a_slow_disk": slow / 60}
    report.ok(
        "saving",
        f"by time every {minutes:g} min on a disk that writes {size(needed)} a second; on a slower "
        f"one rarer, for at most {SAVING_SHARE:.0%} of the time: at {_SLOW_DISK / GB:.1f} GB/s "
        f"every {slow / 60:.1f} min",
    )


def judge_steps(report: Report, config: Config, epoch: Epoch) -> None:
    """Steps, warmup, tokens per step; what packing cuts."""
    packing = epoch.packing
    schedule = LrSchedule.from_config(config.optim, config.lr, epoch.total_steps)
    ranks = device_count(config.trainer.devices)
    tokens = epoch.rows / max(packing.steps, 1)
    report.facts |= {
        "steps_per_epoch": packing.steps,
        "total_steps": epoch.total_steps,
        "warmup_steps": schedule.warmup_steps,
        "rows_per_step": tokens,
    }
    report.ok(
        "steps",
        f"{packing.steps:,} an epoch, {epoch.total_steps:,} in all, {schedule.warmup_steps:,} "
        f"warmup; {tokens:,.0f} tokens a step over {ranks} rank(s), peak lr {config.lr:g}",
    )
    _judge_cuts(report, config, epoch)
    if packing.fill < _FULL_PACK and packing.packs > ranks:
        report.warn("packing", f"packs are {packing.fill:.1%} full", "set a larger max_seq_len")
    else:
        report.ok("packing", f"packs are {packing.fill:.1%} full")


def _judge_cuts(report: Report, config: Config, epoch: Epoch) -> None:
    """Documents as captured against the rows of a pack."""
    packing, tokens = epoch.packing, epoch.longest_document
    if packing.lost_tokens:
        report.warn(
            "long documents",
            f"{packing.lost_tokens:,} rows of {packing.long_documents:,} documents are not trained "
            f"(data.long_documents={config.data.long_documents})",
            "set data.long_documents=split, which loses none, or a larger max_seq_len",
        )
        return
    if not packing.long_documents:
        report.ok("long documents", f"none is split, the longest has {tokens:,} tokens")
        return
    reason = (
        f"the longest has {tokens:,} tokens; {packing.long_documents:,} are split, and "
        f"{packing.clipped_share:.1%} of the supervised rows see clipped context"
    )
    if packing.clipped_share > _CLIPPED:
        whole = -(-(tokens - 1) // _ROWS_MULTIPLE) * _ROWS_MULTIPLE
        report.warn("long documents", reason, f"set max_seq_len={whole} to split none, if it fits")
    else:
        report.ok("long documents", reason)


def planned_rate(config: Config, epoch: Epoch | None, device: Device | None) -> float | None:
    """Rows a second of all ranks at ``MFU``; None: the device's speed is not known."""
    if device is None or device.tflops is None or config.trainer.accelerator is Accelerator.cpu:
        return None
    flops = flops_per_row(config, epoch)
    return device_count(config.trainer.devices) * device.tflops * 1e12 * MFU / flops


def flops_per_row(config: Config, epoch: Epoch | None) -> float:
    """Of a typical pack; without documents: of one that is supervised throughout."""
    rows = config.max_seq_len
    share = 1.0 if epoch is None else min(epoch.packing.supervised_fraction, 1.0)
    document = rows if epoch is None else epoch.document_rows
    return work(Step.of_config(config, PackRows.typical(rows, document, share))).per_row


def judge_time(
    report: Report, config: Config, epoch: Epoch | None, rate: float, assumption: str
) -> None:
    """Hours of the run at ``rate`` rows a second of all ranks, which ``assumption`` explains."""
    report.facts |= {"rows_per_s": rate, "rate_from": assumption}
    pace = f"{rate:,.0f} tokens/s ({assumption})"
    if epoch is None:
        report.ok("time", f"{pace}; {10**7 / rate / 60:,.1f} min for 10 M tokens")
        return
    share = epoch.total_steps / max(epoch.packing.steps, 1)
    hours = epoch.rows * share / rate / 3600
    report.facts["hours"] = hours
    report.ok(
        "time",
        f"{hours:,.2f} h for {epoch.rows * share / 1e6:,.3g} M tokens in {epoch.total_steps:,} "
        f"steps at {pace}; validation, saving and waiting for data not counted",
    )


def bytes_per_row(config: Config, epoch: Epoch | None) -> float:
    """Read for a packed token: aux states of every row, the last state of supervised ones."""
    share = 1.0 if epoch is None else min(epoch.packing.supervised_fraction, 1.0)
    width = STATE_BYTES if epoch is None else epoch.value_bytes
    return (config.model.num_aux_layers + share) * config.model.hidden_size * width


def judge_reading(
    report: Report, config: Config, epoch: Epoch | None, rate: float, measured: float | None
) -> None:
    """Bytes a second that ``rate`` needs, beside what the disk gave to all reader threads."""
    needed = rate * bytes_per_row(config, epoch)
    report.facts |= {"read_bytes_per_s": needed, "measured_read_bytes_per_s": measured}
    wants = f"{needed / 1e9:.3g} GB/s are needed for {rate:,.0f} tokens/s"
    if measured is None:
        report.skip("reading", f"{wants}; the disk was not measured without documents")
    elif measured >= needed:
        report.ok("reading", f"{wants}, measured {measured / 1e9:.3g} GB/s")
    else:
        report.warn(
            "reading",
            f"{wants}, measured {measured / 1e9:.3g} GB/s: cards will wait for data",
            f"move the shards to a faster disk, or raise data.num_workers (it is "
            f"{config.data.num_workers} a rank)",
        )
