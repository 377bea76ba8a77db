"""Memory of a training run on one device, and the longest pack that a card takes.

With ``trainer.strategy=fsdp2`` a rank has its part of weights, optimizer states and gradients, and
beside it the whole weights while they are in use; the plan takes all of them to be so at the peak.

What lives all the time: weights, frozen tensors of the verifier, optimizer states, packs, and the
aux states with noise in float32. On top of it the worst phase of the step, see
:mod:`eagle3.planning.phases`, and a margin.

The formulas are of live tensors and were checked on CPU. Those of a card differ where its operators
do (fused norms, attention over all rows, larger chunks of the loss); neither they nor its margin
have been measured. ``compute.compile`` may keep less than is planned. Validation, which keeps
nothing for a backward, and the temporaries of the optimizer's step are taken to need less.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from eagle3.checks import device_count
from eagle3.config import Config
from eagle3.names import OptimizerName, StrategyName
from eagle3.planning.activations import FLOAT32
from eagle3.planning.phases import Phase, later_phases, phases
from eagle3.planning.sizes import PackRows, Parameters, Step

_STATE_BYTES = 2
"""Of a captured value."""
_ROW_BYTES = 50
"""Ids, gates and positions of a row of a pack."""
_CARD_MARGIN_BYTES = 2 << 30
"""CUDA context, workspaces of cuBLAS and NCCL."""
_CARD_MARGIN_SHARE = 0.05
"""Of the step: memory that the allocator holds in pieces it cannot use."""
_HEAP_MARGIN_SHARE = 0.5
"""Of the step on CPU: freed memory that glibc keeps between live tensors below 32 MiB. Measured
0.03 to 0.66 of steps of 50 to 500 MB, 0.08 of one of 1.9 GB."""
_ROWS_MULTIPLE = 128
_MOST_ROWS = 1 << 24


@dataclass(frozen=True)
class Amount:
    """Bytes of one part."""

    name: str
    num_bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """Peak memory of one rank on its device."""

    max_seq_len: int
    resident: tuple[Amount, ...]
    """Lives all the time."""
    peak: Phase
    """The worst phase, on top of it."""
    margin_bytes: int
    card_bytes: int | None = None
    """Memory of the device; None: not asked."""

    @property
    def step_bytes(self) -> int:
        """Peak of a forward and backward over weights, states and packs, gradients included."""
        return self.peak.total

    @property
    def total_bytes(self) -> int:
        resident = sum(amount.num_bytes for amount in self.resident)
        return resident + self.peak.total + self.margin_bytes

    @property
    def fits(self) -> bool:
        """Whether the device takes it; true where none was named."""
        return self.card_bytes is None or self.total_bytes <= self.card_bytes

    def lines(self) -> list[str]:
        """A table: a part a line, then the total and what is left of the device."""
        in_peak = [
            Amount("activations", self.peak.activations),
            Amount("gradients", self.peak.gradients),
            Amount("loss", self.peak.loss),
            Amount("temporaries", self.peak.temporaries),
        ]
        amounts = [*self.resident, *in_peak, Amount("margin", self.margin_bytes)]
        rows = [f"{a.name:<32} {a.num_bytes / 1e9:>9.3f} GB" for a in amounts if a.num_bytes]
        total = f"{'total':<32} {self.total_bytes / 1e9:>9.3f} GB"
        if self.card_bytes is not None:
            left = (self.card_bytes - self.total_bytes) / 1e9
            verdict = f"{left:.1f} GB left" if self.fits else f"{-left:.1f} GB too much"
            total += f" of {self.card_bytes / 1e9:.0f} GB: {verdict}"
        return [
            f"memory of a rank, packs of {self.max_seq_len:,} rows; worst: {self.peak.name}",
            *rows,
            total,
        ]


def plan(
    config: Config,
    card_bytes: int | None = None,
    *,
    supervised_share: float = 1.0,
    document_rows: int | None = None,
    world_size: int | None = None,
) -> MemoryPlan:
    """Peak memory of a rank that trains as ``config`` says.

    Args:
        card_bytes: memory of the device.
        supervised_share: of the rows of the fullest pack, those that gate a loss; 1 is the worst.
        document_rows: rows of a document; None: one document fills a pack.
        world_size: ranks; None: as many as ``trainer.devices`` names.

    Raises:
        ConfigError: ``trainer.devices`` names no devices.
        ValueError: a share outside 0 to 1.
    """
    rows = config.max_seq_len
    pack = PackRows.typical(rows, document_rows or rows, supervised_share)
    step = Step.of_config(config, pack)
    ranks = device_count(config.trainer.devices) if world_size is None else world_size
    packs = accumulated_packs(config, ranks)
    shards = ranks if config.trainer.strategy is StrategyName.fsdp2 else 1
    # with several packs gradients gather outside of the buckets until the last is backpropagated
    alive = phases(step, in_buckets=ranks > 1 and shards == 1 and packs == 1)
    # sharded gradients are handed over after every pack, so that a later one finds only its part
    alive += later_phases(step) if packs > 1 and shards == 1 else []
    peak = max(alive, key=lambda phase: phase.total)
    share = _HEAP_MARGIN_SHARE if step.on_cpu else _CARD_MARGIN_SHARE
    fixed = 0 if step.on_cpu else _CARD_MARGIN_BYTES
    return MemoryPlan(
        max_seq_len=rows,
        resident=_resident(config, step, ranks, packs, shards),
        peak=peak,
        margin_bytes=int(fixed + share * peak.total),
        card_bytes=card_bytes,
    )


def longest_max_seq_len(
    config: Config,
    card_bytes: int,
    *,
    supervised_share: float = 1.0,
    world_size: int | None = None,
) -> int:
    """The largest multiple of 128 rows whose plan fits a device; 0: not even 128 do.

    ``tokens_per_step`` stays as it is, so that longer packs are fewer in an optimizer step.
    """

    def fits(blocks: int) -> bool:
        longer = replace(config, max_seq_len=blocks * _ROWS_MULTIPLE)
        found = plan(longer, card_bytes, supervised_share=supervised_share, world_size=world_size)
        return found.fits

    low, high = 0, _MOST_ROWS // _ROWS_MULTIPLE
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * _ROWS_MULTIPLE


def accumulated_packs(config: Config, world_size: int) -> int:
    """Packs of a rank in an optimizer step, rounded up where ``tokens_per_step`` is no multiple."""
    if config.tokens_per_step is None:
        return 1
    return max(-(-config.tokens_per_step // (world_size * config.max_seq_len)), 1)


def _resident(
    config: Config, step: Step, world_size: int, packs: int, shards: int
) -> tuple[Amount, ...]:
    sizes, model = Parameters(config.model), config.model
    frozen_head = 0 if model.lm_head_trainable else sizes.lm_head * FLOAT32
    embeddings = model.vocab_size * model.hidden_size * step.product_bytes
    full = embeddings if step.full_verifier_head else 0
    aux_values = step.rows * model.num_aux_layers * model.hidden_size
    pack = (aux_values + step.rows * model.hidden_size) * _STATE_BYTES + step.rows * _ROW_BYTES
    # Packs read ahead lie in the memory of the host.
    held = packs * (1 + config.data.prefetch_windows) if step.on_cpu else packs
    heads = full + sizes.lm_head * step.product_bytes
    trained = sizes.trained * FLOAT32
    return (
        Amount("weights", -(-(trained + frozen_head) // shards)),
        Amount("verifier: embeddings and heads", embeddings + heads),
        Amount("optimizer states", -(-_optimizer_bytes(config, sizes) // shards)),
        Amount("weights of the start", trained if config.optim.pull_to_start else 0),
        Amount("buckets that ranks exchange", trained if world_size > 1 and shards == 1 else 0),
        *(_sharding(sizes, frozen_head, shards) if shards > 1 else ()),
        Amount("packs", held * pack),
        Amount("aux states with noise", aux_values * FLOAT32),
    )


def _sharding(sizes: Parameters, frozen_head: int, shards: int) -> tuple[Amount, ...]:
    """What shared-out weights cost on top: none is planned to be given away before the end."""
    trained = sizes.trained * FLOAT32
    largest = max(sizes.body - sizes.fc, sizes.fc, sizes.lm_head) * FLOAT32
    return (
        Amount("weights gathered", trained + frozen_head),
        Amount("gradients of the own part", -(-trained // shards)),
        Amount("gradients in exchange", largest),
    )


def _optimizer_bytes(config: Config, sizes: Parameters) -> int:
    """AdamW has two moments a weight; Muon one, on the matrices that it moves."""
    moments = 2 * sizes.trained
    if config.optim.optimizer is OptimizerName.muon:
        moments -= sizes.body
    return moments * FLOAT32
