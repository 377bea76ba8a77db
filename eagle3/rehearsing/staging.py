"""A rehearsal made ready: its configuration, and the files that it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from eagle3.checks import check, device_count
from eagle3.config import Config
from eagle3.distributed import Ranks, ranks_from_environment
from eagle3.locking import exclusive
from eagle3.rehearsing.lengths import outlines
from eagle3.rehearsing.reduction import reduced
from eagle3.rehearsing.table import Staged, table_lines
from eagle3.rehearsing.world import World, world_name, write_world

_UNSET = "."


def rehearse(config: Config, train: Callable[[Config], float]) -> float:
    """Stage ``config``, ``train`` what is staged, and print what that has shown.

    Returns:
        What ``train`` returns.
    """
    is_main = (ranks_from_environment() or Ranks()).rank == 0
    staged = stage(config)
    if is_main:
        ranks = device_count(staged.config.trainer.devices)
        print(
            f"rehearsal of {config.name}: hidden size {staged.config.model.hidden_size}, {ranks} "
            f"process(es) on CPU, {len(staged.drawn)} made-up documents of "
            f"{int(staged.drawn.lengths.mean()):,} tokens in {staged.config.paths.shards}"
        )
    result = train(staged.config)
    if is_main:
        print("\n".join(table_lines(config, staged)))
    return result


def stage(config: Config) -> Staged:
    """Reduce ``config`` and write what it reads below ``paths.cache``, unless it is there.

    Ranks that are started together wait for the first. The same configuration and documents give
    the same files, so that a run goes on with ``resume=auto`` as any other.

    Raises:
        ConfigError: the experiment cannot run so, whatever its paths are.
        DataError: ``paths.shards`` cannot be opened, or the disk is full.
    """
    _check(config)
    drawn = outlines(config)
    small = reduced(config)
    root = Path(config.paths.cache) / "rehearsal" / world_name(small.model, drawn, config.seed)
    world = World(root)
    paths = replace(
        small.paths,
        verifier=str(world.verifier),
        shards=str(world.shards),
        vocab_map=str(world.vocab_map),
    )
    small = replace(small, paths=paths)
    with exclusive(root / ".lock", print):
        if not world.is_complete:
            write_world(world, small.model, drawn, config.seed)
    return Staged(small, drawn)


def _check(config: Config) -> None:
    """Refuse what the real run would refuse, but for paths that are not set yet."""
    paths = config.paths
    filled = replace(
        paths,
        verifier=paths.verifier or _UNSET,
        shards=paths.shards or (None if config.data.mixture else _UNSET),
        vocab_map=paths.vocab_map or _UNSET,
    )
    check(replace(config, paths=filled))
