"""The configuration of ``python -m eagle3.evaluate``."""

from __future__ import annotations

from dataclasses import dataclass, field

from eagle3.config import DataConfig, ModelConfig, PathsConfig, TrainerConfig, ValConfig


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
class EvaluateConfig:
    """What is judged, and on what. Groups left out are those of the checkpoint's run."""

    ckpt: str | None = None
    """A checkpoint of this package, such as RUN/checkpoints/best.ckpt."""
    head: str | None = None
    """Directory or file of a trained head of another maker, or an export; needs the paths."""
    prompts: str | None = None
    """Prompts or conversations, one a line, for a server."""
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
