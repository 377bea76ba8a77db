"""Two holders of one lock take turns."""

from __future__ import annotations

import threading
from pathlib import Path

from eagle3.locking import exclusive


def test_the_second_holder_waits_for_the_first(tmp_path: Path) -> None:
    lock, events = tmp_path / "new" / ".lock", []
    waits = threading.Event()

    def second() -> None:
        with exclusive(lock, lambda line: (events.append(line), waits.set())):
            events.append("second in")

    with exclusive(lock, events.append):
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(timeout=10)
        events.append("first out")
    thread.join(timeout=10)
    assert events == [f"waiting: another process holds {lock}", "first out", "second in"]
