"""The typed configuration: one frozen dataclass per group, and the checks across groups.

Hydra composes plain YAML (``conf/``); :func:`eagle3.compose.to_config` merges it onto this schema,
so an unknown key or a wrong type is an error, and nobody can change a value afterwards.
Every field says its unit and what a null means.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from eagle3.names import (
    Accelerator,
    Arch,
    Arrival,
    AttentionImpl,
    BodyInit,
    CaptureSource,
    CardName,
    Compile,
    ComputedRows,
    DataChange,
    EmbeddingHalf,
    LastHidden,
    LayerIdConvention,
    LmHeadInit,
    LongDocuments,
    LossImpl,
    Noise,
    NormPreset,
    OptimizerName,
    Precision,
    RankStart,
    ReadMode,
    Recompute,
    RehearsalPlace,
    RopeType,
    Schedule,
    StrategyName,
    Switch,
    TrainOn,
    WandbMode,
)

RESUME_AUTO = "auto"
"""Value of ``resume`` that finds the checkpoint by itself."""


@dataclass(frozen=True)
class PathsConfig:
    """Every path a user may have to set."""

    verifier: str | None = None
    """Directory with the verifier's ``config.json`` and ``*.safetensors``."""
    shards: str | None = None
    """Directory of captured hidden states; several: see ``data.mixture``."""
    val_shards: str | None = None
    """Explicit validation directory; null: chosen from ``shards`` by hash of the prompt."""
    vocab_map: str | None = None
    """Draft vocabulary map (``.safetensors``/``.pt`` file or directory with d2t and t2d)."""
    init: str | None = None
    """Trained drafter to start from: one of our checkpoints, or the directory or file of a
    SpecForge or speculators head; null: a fresh one."""
    arrow: str | None = None
    """Token ids and masks of a speculators directory; null: beside its states."""
    source_labels: str | None = None
    """CSV file with sample_id,source; null: ``sources.csv`` in each directory, or its name."""
    output: str = "runs"
    """Run folders are made here."""
    cache: str = ".cache/eagle3"
    """Indexes of foreign directories and downloads; safe to delete."""


@dataclass(frozen=True)
class MixturePart:
    """One of several directories to train on."""

    path: str = ""
    weight: float = 1.0
    """How often an epoch takes each of its documents; 0.5: every other one, by turns."""


@dataclass(frozen=True)
class DataConfig:
    """Reading, packing and splitting of documents."""

    mixture: list[MixturePart] = field(default_factory=list)
    """Several directories with weights, instead of ``paths.shards``."""
    arrival: Arrival = Arrival.complete
    """``growing``: train each document of ``paths.shards`` once, while a capture writes them."""
    arrival_timeout_s: float = 600.0
    """Seconds without a new document, while training waits for one, before the run stops."""
    aux_layer_ids: list[int] | None = None
    """Ids of the stored aux layers; null: as the data directory declares."""
    layer_id_convention: LayerIdConvention | None = None
    """What these ids count; null: as the data directory declares."""
    last_hidden: LastHidden | None = None
    """Kind of the stored last state; null: as the data directory declares."""
    train_on: TrainOn = TrainOn.assistant
    long_documents: LongDocuments = LongDocuments.split
    split_context_tokens: int = 128
    """Rows before a split that give keys only, so that no row starts without context."""
    val_ratio: float = 0.05
    """Share of prompts held out for validation."""
    max_samples: int | None = None
    """Use only the first so many documents of each directory; null: all."""
    max_bad_samples: int = 10
    """Unreadable or non-finite samples skipped in a run before it stops."""
    num_workers: int = 4
    """Reader threads per rank."""
    read_mode: ReadMode = ReadMode.auto
    """How bytes leave the disk; auto: measured at the start."""
    prefetch_windows: int = 2
    """Optimizer windows read ahead per rank."""
    noise: Noise = Noise.gaussian
    on_change: DataChange = DataChange.refuse
    """What continuing a run does when its documents are no longer the same."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of the drafter (its own, not the verifier's)."""

    theta: float = 10000.0
    type: RopeType = RopeType.default
    factor: float = 1.0
    """Context extension factor of linear, llama3 and yarn."""
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the drafter; ``hidden_size`` and ``vocab_size`` must be the verifier's."""

    hidden_size: int = 576
    vocab_size: int = 49152
    draft_vocab_size: int = 8192
    intermediate_size: int = 1536
    num_attention_heads: int = 9
    num_key_value_heads: int = 3
    head_dim: int = 64
    num_aux_layers: int = 3
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 8192
    rope: RopeConfig = field(default_factory=RopeConfig)
    arch: Arch = Arch.llama
    sliding_window: int | None = None
    """Keys visible to a query, in token positions; null: all."""
    norm_layout: NormPreset = NormPreset.portable
    body_init: BodyInit = BodyInit.logit_lens
    lm_head_init: LmHeadInit = LmHeadInit.verifier
    lm_head_trainable: bool = True


@dataclass(frozen=True)
class ComputeConfig:
    """How a step is computed. Every choice gives the same loss and gradients, up to rounding."""

    rows: ComputedRows = ComputedRows.read
    embedding_half: EmbeddingHalf = EmbeddingHalf.once
    attention: AttentionImpl = AttentionImpl.merged
    loss: LossImpl = LossImpl.deferred
    recompute: Recompute = Recompute.none
    compile: Compile = Compile.none
    """``layer``: fewer and larger kernels in training, after a first step that takes longer."""

    @classmethod
    def reference(cls) -> ComputeConfig:
        """Everything off: the plain path, as trainers without these techniques compute."""
        return cls(
            rows=ComputedRows.all,
            embedding_half=EmbeddingHalf.each_step,
            attention=AttentionImpl.sdpa,
            loss=LossImpl.reference,
        )


@dataclass(frozen=True)
class LossTerm:
    """One term of a loss mix."""

    name: str = "kl"
    weight: float = 1.0


@dataclass(frozen=True)
class LossConfig:
    """Distillation loss: a weighted mix of named divergences, decayed per TTT step."""

    mix: list[LossTerm] = field(default_factory=lambda: [LossTerm()])
    step_loss_decay: float = 1.0
    """Step s weighs ``step_loss_decay ** s``."""


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its schedule, a pure function of the optimizer step."""

    optimizer: OptimizerName = OptimizerName.adamw
    schedule: Schedule = Schedule.cosine
    warmup_ratio: float = 0.01
    min_lr_ratio: float = 0.0
    """Final learning rate over the peak."""
    weight_decay: float = 0.01
    """On matrices only; norms are not decayed."""
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    """Of AdamW, as both betas; on weights that Muon steps they do nothing."""
    muon_momentum: float = 0.95
    muon_ns_steps: int = 5
    """Newton-Schulz iterations that make an update orthogonal."""
    clip_norm: float = 1.0
    """Global gradient norm above which gradients are scaled down."""
    pull_to_start: float = 0.0
    """Strength of an L2 pull of all weights towards those of ``paths.init``; 0: none."""


@dataclass(frozen=True)
class TrainerConfig:
    """Where and how long to train."""

    accelerator: Accelerator = Accelerator.auto
    devices: Any = 1
    """A count of cards (processes on CPU), or a list of card numbers such as [4,5,6,7]."""
    start: RankStart = RankStart.auto
    """Who starts the processes of several devices."""
    strategy: StrategyName = StrategyName.ddp
    precision: Precision = Precision.auto
    max_steps: int | None = None
    """Stop after so many optimizer steps; null: ``epochs`` decide."""
    log_every_steps: int = 10
    checkpoint_every_steps: int | None = None
    """Also save a checkpoint every so many optimizer steps; null: at epoch ends and by time."""
    checkpoint_every_minutes: float | None = 20.0
    """Also save a checkpoint when the last is so old; null: at epoch ends and by steps."""
    keep_last: int = 2
    """Newest checkpoints that are kept beside the best."""
    all_reduce_timeout_s: float = 60.0
    """Limit of the first all-reduce; past it the message names the usual remedies."""


@dataclass(frozen=True)
class ValConfig:
    """Validation, the same for every job of a sweep."""

    draft_steps: int = 3
    """Draft tokens per round in the acceptance estimate, whatever ``ttt_steps`` is."""
    max_seq_len: int = 8192
    """Rows of a validation pack, whatever the training ``max_seq_len`` is."""
    every_steps: int | None = None
    """Also validate every so many optimizer steps; null: at epoch ends only."""
    full_verifier_head: bool = False
    """Find uncovered rows with the verifier's whole head; false: by the data's next token."""
    early_stop: str | None = None
    """Metric, such as val/acceptance_replay, that ends training where it stays; null: none."""
    patience: int = 3
    """Validations in a row without a new best of ``early_stop`` that end training."""


@dataclass(frozen=True)
class HealthConfig:
    """What a run watches about itself; nothing of it changes what is trained."""

    stall_minutes: float = 10.0
    """Without a step or a validation batch for so long, the run warns and writes its stacks."""
    grad_norm_factor: float = 10.0
    """A gradient norm of more than so many times the recent median is worth a warning."""
    heartbeat_s: float = 10.0
    """Seconds between two writes of ``heartbeat.json``."""


@dataclass(frozen=True)
class LoggerConfig:
    """Weights & Biases; the CSV file is always written."""

    wandb: WandbMode = WandbMode.auto
    project: str = "eagle3"
    group: str | None = None
    """Null: the sweep, else the experiment name."""


@dataclass(frozen=True)
class CaptureConfig:
    """How missing shards are made before training."""

    source: CaptureSource = CaptureSource.off
    aux_layer_ids: list[int] = field(default_factory=list)
    """Layers whose entering residual stream is stored."""
    num_samples: int | None = None
    """Use so many token sequences; null: all."""
    batch_tokens: int = 1024
    """Tokens of one prefill batch, padding included."""


@dataclass(frozen=True)
class RehearsalConfig:
    """The whole path on a narrow model and made-up states: ``+rehearsal=cpu``."""

    place: RehearsalPlace = RehearsalPlace.off
    width_divisor: int = 64
    """Hidden size, MLP and vocabularies are one part in so many; heads and their size share it."""
    samples: int = 160
    """Made-up documents, at most."""
    epochs: int = 2
    """At most, whatever ``epochs`` is."""
    checkpoint_every_steps: int = 10
    """Where ``trainer.checkpoint_every_steps`` is null: so short a run saves by no clock."""


@dataclass(frozen=True)
class Config:
    """The whole run. The knobs that users sweep stand on top."""

    name: str = "eagle3"
    lr: float = 3e-5
    epochs: int = 5
    max_seq_len: int = 4096
    """Rows of one pack."""
    ttt_steps: int = 3
    noise_std: float = 0.05
    """Standard deviation of the noise on aux states; 0 switches it off."""
    tokens_per_step: int | None = None
    """Rows of one optimizer step over all ranks, reached by accumulation; null: one pack a rank."""
    seed: int = 0
    resume: str | None = None
    """Checkpoint to continue from, with the settings of its run; null: begin anew; auto: the newest
    of the latest run of this job that did not finish."""
    preflight: Switch = Switch.on
    """Whether training begins with the cheap checks of ``python -m eagle3.preflight``."""
    preflight_json: str | None = None
    """File that ``eagle3.preflight`` writes its findings to; null: none."""
    card: CardName | None = None
    """Card that memory and time are planned for; null: the one that is here."""
    paths: PathsConfig = field(default_factory=PathsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    val: ValConfig = field(default_factory=ValConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    rehearsal: RehearsalConfig = field(default_factory=RehearsalConfig)
