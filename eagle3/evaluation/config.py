"""The configuration of ``python -m eagle3.evaluate``."""

from __future__ import annotations

from dataclasses import dataclass, field

from eagle3.config import DataConfig, ModelConfig, PathsConfig, TrainerConfig, ValConfig
from eagle3.names import StatesDtype


@dataclass(frozen=True)
class ServerConfig:
    """A running SGLang or vLLM server with the drafter in it."""

    timeout_s: float = 300.0
    """Limit of one request."""
    attempts: int = 3
    """Tries of a request before it is listed as failed."""
    in_flight: int = 8
    """Requests at a time; 1 measures the latency of a single user."""
    max_new_tokens: int = 512
    temperature: float = 0.0
    model: str | None = None
    """Name that a vLLM server serves; null: the first it lists."""


@dataclass(frozen=True)
class LiveConfig:
    """Speculative decoding in this process."""

    held_out: int = 0
    """So many held-out documents, spread over all; the verifier answers their prompts. 0: none."""
    num_prompts: int | None = None
    """Of ``prompts``, spread over the file; null: all."""
    draft_tokens: list[int] = field(default_factory=lambda: [3])
    """Drafts of a round (servers: num_speculative_tokens). Several take turns, batch by batch; the
    first is the one that is reported as ``live/*``."""
    max_new_tokens: int = 192
    batch_size: int = 1
    """Prompts that are answered together."""
    temperature: float = 0.0
    """0: greedy; the verifier's answers are then compared with its own ``generate``."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    seed: int = 0
    """Of the choice of prompts, and of sampling."""
    dtype: StatesDtype = StatesDtype.float32
    """In which verifier and drafter compute."""
    device: str = "auto"
    """``auto``: a GPU where there is one."""


@dataclass(frozen=True)
class SpeedConfig:
    """What drafting would be worth on a large server, by arithmetic."""

    baseline_tok_s: float | None = None
    """Tokens per second of one user without drafting; null: no prediction."""
    acceptance: list[float] = field(default_factory=list)
    """Share of rounds that accept draft 1, 2, ...; empty: as this evaluation finds it."""
    verifier_cost: list[float] = field(default_factory=list)
    """Time of a verifier pass over 1, 2, ... tokens of each sequence, as a multiple of the first;
    empty: all 1, which is the best that a server can do."""
    drafter_ms: float = 0.0
    """Milliseconds of one draft."""


@dataclass(frozen=True)
class EvaluateConfig:
    """What is judged, and on what. Groups left out are those of the checkpoint's run."""

    ckpt: str | None = None
    """A checkpoint of this package, such as RUN/checkpoints/best.ckpt."""
    head: str | None = None
    """Directory or file of a trained head of another maker, or an export; needs the paths."""
    prompts: str | None = None
    """Prompts, conversations or token ids, one a line, for a server or to decode here."""
    server: str | None = None
    """URL of a server that drafts; prompts are sent to it."""
    baseline_server: str | None = None
    """URL of the same server without speculation, to compare with."""
    baseline_tok_s: float | None = None
    """Its tokens per second, if it was measured before."""
    export_dir: str | None = None
    """What the server has loaded, to look for causes of a bad acceptance."""
    wandb_run: str | None = None
    """Id of the training run whose summary gets the figures; null: the checkpoint's."""
    out: str | None = None
    """Folder for the results; null: ``evaluation_*`` beside the checkpoints, or below the
    working directory."""
    paths: PathsConfig = field(default_factory=PathsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    val: ValConfig = field(default_factory=ValConfig)
    serve: ServerConfig = field(default_factory=ServerConfig)
    live: LiveConfig = field(default_factory=LiveConfig)
    speed: SpeedConfig = field(default_factory=SpeedConfig)
