"""What the tests look at in windows."""

import threading
from collections.abc import Iterable

from eagle3.data.batch import Window
from eagle3.data.datamodule import ShardDataModule


def windows(data: ShardDataModule) -> list[Window]:
    data.setup()
    return list(data.train_dataloader())


def chain_starts(found: Iterable[Window]) -> list[tuple[float, ...]]:
    """The aux state of every row in which a chain starts: a name for the row."""
    return sorted(
        tuple(row)
        for window in found
        for pack in window.packs
        for row in pack.aux_hidden[pack.start_mask].float().tolist()
    )


def reader_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("eagle3-reader")]
