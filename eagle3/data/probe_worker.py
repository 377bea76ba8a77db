"""A process that probes files for another one: ``python -m eagle3.data.probe_worker``.

Reads a pickled store and then lists of file names from standard input, until it closes; writes for
each list the list of its results to standard output. Imports no torch, so it starts quickly.
"""

from __future__ import annotations

import os
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

from eagle3.data.store import Store, attempt

_THREADS = 4
"""Reads under way, for disks that answer late."""


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer until ``requests`` ends."""
    store: Store = pickle.load(requests)
    with ThreadPoolExecutor(_THREADS) as pool:
        while True:
            try:
                files: list[str] = pickle.load(requests)
            except EOFError:
                return
            found = list(pool.map(lambda file: attempt(store, file), files))
            pickle.dump(found, replies, pickle.HIGHEST_PROTOCOL)
            replies.flush()


if __name__ == "__main__":
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what is printed must not mix with replies
    serve(sys.stdin.buffer, answers)
