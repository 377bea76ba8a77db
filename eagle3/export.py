"""From checkpoint to served drafter: ``python -m eagle3.export ckpt=RUN/checkpoints/best.ckpt``.

Writes a directory for SGLang and vLLM (``target=``) and proves that they load what was trained.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.compose import Command, Job, entry_point
from eagle3.errors import ConfigError
from eagle3.serving.config import ExportConfig

if TYPE_CHECKING:
    from eagle3.serving.proof import Check

EXPORT = Command("export", ExportConfig)


def export(settings: ExportConfig, job: Job) -> None:
    """Read, plan, write, prove, say."""
    if (settings.ckpt is None) != settings.dry_run:
        raise ConfigError(
            f"found ckpt={settings.ckpt} and dry_run={str(settings.dry_run).lower()}, expected "
            "ckpt=RUN/checkpoints/best.ckpt for a trained drafter, or dry_run=true with an "
            "experiment= for an untrained one"
        )
    out = _out(settings)
    from eagle3.serving.plan import plan_export  # seconds of imports
    from eagle3.serving.source import read_checkpoint
    from eagle3.serving.untrained import untrained_source
    from eagle3.serving.writing import write_proven

    if settings.dry_run:
        source = untrained_source(settings)
    else:
        source = read_checkpoint(settings, job.overridden)
    plan = plan_export(source, settings)
    for line in plan.warnings:
        print(f"warning: {line}")
    checks = write_proven(out, source, plan, settings)
    print(*table(checks), sep="\n")
    print(f"serves:   {'; '.join(plan.serves)}")
    print(f"written:  {out}")


def table(checks: Sequence[Check]) -> list[str]:
    """The proof as aligned lines."""
    width = max(len(check.name) for check in checks)
    return [f"{'ok' if c.holds else 'NO'}  {c.name:<{width}}  {c.found}" for c in checks]


def _out(settings: ExportConfig) -> Path:
    if settings.out is not None:
        return Path(settings.out).resolve()
    if settings.ckpt is None:
        raise ConfigError("out is not set: give out=DIR, a new directory for the export")
    return Path(settings.ckpt).resolve().parent.parent / f"export_{settings.target}"


if __name__ == "__main__":
    sys.exit(entry_point(export, command=EXPORT))
