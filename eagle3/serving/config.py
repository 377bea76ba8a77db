"""The configuration of ``python -m eagle3.export``."""

from __future__ import annotations

from dataclasses import dataclass

from eagle3.config import Config
from eagle3.names import ExportDtype, ExportEmbeddings, ExportTarget


@dataclass(frozen=True)
class ExportConfig(Config):
    """What is exported, and for whom. The keys of training count with ``dry_run`` only."""

    ckpt: str | None = None
    """A checkpoint of this package, such as RUN/checkpoints/best.ckpt."""
    dry_run: bool = False
    """Instead of ``ckpt``: an untrained drafter of these settings, to try serving beforehand."""
    target: ExportTarget = ExportTarget.both
    out: str | None = None
    """New directory; null: ``export_TARGET`` in the run folder of ``ckpt``."""
    min_sglang: str = "0.5.14"
    """Oldest SGLang that is to serve it."""
    min_vllm: str = "0.33.0"
    """Oldest vLLM that is to serve it."""
    embeddings: ExportEmbeddings = ExportEmbeddings.omit
    dtype: ExportDtype = ExportDtype.bfloat16
    num_speculative_tokens: int = 3
    """Draft tokens a round in the serve scripts."""
    served_verifier: str | None = None
    """Directory or hub name of the verifier in scripts and card; null: as it was recorded."""
