"""What a rehearsal has shown, and what only the real run can show."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import wrap

from eagle3.checks import accumulate, device_count
from eagle3.config import Config
from eagle3.names import Arrival, CaptureSource
from eagle3.rehearsing.lengths import Outlines

_COLUMN = 47


@dataclass(frozen=True, eq=False)
class Staged:
    """What a rehearsal trains."""

    config: Config
    """Reduced, with every path set."""
    drawn: Outlines


def table_lines(config: Config, staged: Staged) -> list[str]:
    """Two columns of text; ``config`` is the experiment as it was asked for."""
    columns = [_cells(rehearsed(staged)), _cells(not_rehearsed(config, staged))]
    height = max(map(len, columns))
    left, right = (column + [""] * (height - len(column)) for column in columns)
    title = f"{'rehearsed':<{_COLUMN}} | not rehearsed"
    rows = [f"{a:<{_COLUMN}} | {b}".rstrip() for a, b in zip(left, right, strict=True)]
    return [title, f"{'-' * _COLUMN} | {'-' * _COLUMN}", *rows]


def rehearsed(staged: Staged) -> list[str]:
    """One entry for each thing that ran as it will run."""
    config = staged.config
    ranks = device_count(config.trainer.devices)
    tokens = ranks * accumulate(config, ranks) * config.max_seq_len
    return [
        f"{ranks} rank(s)" + (", gloo, gradients averaged by DDP" if ranks > 1 else ""),
        f"packs of {config.max_seq_len:,} rows, {tokens:,} rows a step",
        f"{len(staged.drawn)} documents, lengths drawn from {staged.drawn.origin}",
        f"{config.ttt_steps} TTT steps, noise {config.noise_std:g}, compute as configured",
        f"{config.optim.optimizer}, {config.optim.schedule} schedule from warmup to end",
        "validation, best and newest checkpoints, resume=auto",
        "metrics, curves, summary",
    ]


def not_rehearsed(config: Config, staged: Staged) -> list[str]:
    """One entry for each thing that this run says nothing about."""
    model, small = config.model, staged.config.model
    entries = [
        "CUDA: kernels, bfloat16 autocast, NCCL, pinned copies",
        f"real memory: hidden size {small.hidden_size} instead of {model.hidden_size}; "
        "python -m eagle3.preflight plans it",
        "speed of cards, and of the disk with real states",
        "your verifier, states and vocabulary map: these were made up",
    ]
    if staged.config.epochs < config.epochs:
        entries.append(f"{config.epochs} epochs: this had {staged.config.epochs}")
    for left_out, what in (
        (config.paths.init, "the start from paths.init"),
        (config.paths.val_shards, "paths.val_shards: prompts were held out instead"),
        (config.data.mixture, "weights of data.mixture: one directory held everything"),
        (config.data.arrival is Arrival.growing, "data.arrival=growing: all was there"),
        (config.capture.source is not CaptureSource.off, "the capture"),
    ):
        if left_out:
            entries.append(what)
    return entries


def _cells(entries: list[str]) -> list[str]:
    return [line for entry in entries for line in wrap(entry, _COLUMN, subsequent_indent="  ")]
