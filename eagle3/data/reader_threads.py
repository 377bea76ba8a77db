"""Threads that do the most urgent task first.

Threads, not processes: a read releases the interpreter lock, and nothing has to be pickled or
copied between processes.
"""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)
_PATIENCE_S = 2.0
"""A read of a few MB ends well within it, unless the disk does not answer."""

Task = Callable[[], None]


class ReaderThreads:
    """``count`` threads. Tasks must not raise. Use as a context manager: leaving it gives up the
    tasks that were not begun, and waits for the others.
    """

    def __init__(self, count: int) -> None:
        self._tasks: queue.PriorityQueue[tuple[float, int, Task | None]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._closed = False
        self._threads = [
            # Daemons: a disk that never answers must not keep the program from ending.
            threading.Thread(target=self._work, name=f"eagle3-reader-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, urgency: int, task: Task) -> None:
        """Do ``task`` before those with a larger ``urgency``, in the order they came."""
        self._tasks.put((urgency, next(self._order), task))

    def __enter__(self) -> ReaderThreads:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        for _thread in self._threads:
            self._tasks.put((-math.inf, next(self._order), None))
        deadline = time.monotonic() + _PATIENCE_S
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))
        stuck = sum(thread.is_alive() for thread in self._threads)
        if stuck:
            logger.warning(
                "%d reader threads still wait for the disk and are left behind; they end when it "
                "answers",
                stuck,
            )

    def _work(self) -> None:
        while True:
            task = self._tasks.get()[2]
            if task is None or self._closed:
                return
            task()
            del task  # or a waiting thread would keep the memory of its last pack
