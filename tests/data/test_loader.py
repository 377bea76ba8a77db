"""Windows read under a tight limit of open files."""

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import eagle3


def test_few_file_descriptors_are_enough(
    tmp_path: Path, document: Callable[..., dict[str, Any]], write: Callable[..., Path]
) -> None:
    """Fifty samples, two reader threads, two epochs, at most 128 open files."""
    shards = write(tmp_path / "s", [document(9, seed) for seed in range(50)])
    script = f"""
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
        from eagle3.data.bad_samples import BadSamples
        from eagle3.data.declaration import Declaration
        from eagle3.data.formats import StateLayout
        from eagle3.data.loader import PackReader, WindowLoader
        from eagle3.data.packing import PackingRule, pack_epoch
        from eagle3.data.plan import EpochPlan
        from eagle3.data.shards import open_shards
        from eagle3.names import LastHidden, LayerIdConvention, LongDocuments, TrainOn

        bad = BadSamples(0)
        declared = Declaration((1, 2, 3), LayerIdConvention.entering, LastHidden.pre_norm)
        shards = open_shards(
            {str(shards)!r}, StateLayout(3, 4, 50), declared, train_on=TrainOn.assistant,
            max_samples=None, cache={str(tmp_path / "cache")!r}, bad_samples=bad, num_workers=2,
        )
        segments = shards.segment(range(50), PackingRule(400, LongDocuments.split, 4, 3)).segments
        reader = PackReader(shards.reader, shards.index, TrainOn.assistant)
        kept = []
        for epoch in range(2):
            plan = EpochPlan(pack_epoch(segments, 400, 0, epoch), 1, 1)
            kept += WindowLoader(plan, reader, bad, 400, 0, epoch, 2, 2)
        print(sum(pack.num_rows for window in kept for pack in window.packs))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(eagle3.__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 2 * 50 * 8
