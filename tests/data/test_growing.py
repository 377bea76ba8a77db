"""Documents of a directory that another process is still filling."""

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.data import growing
from eagle3.data.bad_samples import BadSamples
from eagle3.data.declaration import Declaration
from eagle3.data.growing import GrowingDirectory, Patience
from eagle3.data.layout import StateLayout
from eagle3.errors import DataError
from eagle3.names import LastHidden, LayerIdConvention
from tests.data.arrivals import (
    IMPATIENT,
    ORDER,
    QUICK,
    SOON_STALLED,
    begin,
    fill,
    writer_process,
)
from tests.data.speculators_files import Document

Watch = Callable[..., GrowingDirectory]


@pytest.fixture
def staged(document: Callable[..., Document], write: Callable[..., Path], tmp_path: Path) -> Path:
    """The files before they arrive."""
    return write(tmp_path / "staged", [document(6 + 5 * i % 17, seed=i) for i in range(8)])


@pytest.fixture
def arriving(tmp_path: Path) -> Path:
    return tmp_path / "arriving"


@pytest.fixture
def watch(arriving: Path, layout: StateLayout) -> Watch:
    def make(bad_samples: BadSamples | None = None, **changes: Any) -> GrowingDirectory:
        arguments = {"patience": QUICK} | changes
        bad_samples = BadSamples(0) if bad_samples is None else bad_samples
        return GrowingDirectory(arriving, layout, bad_samples, **arguments)

    return make


def names(source: GrowingDirectory) -> list[str]:
    return [record.file for batch in source for record in batch]


@pytest.mark.parametrize("how", ["rename", "in-place"])
def test_files_come_in_the_order_in_which_they_became_whole(
    how: str, staged: Path, arriving: Path, watch: Watch
) -> None:
    with writer_process(staged, arriving, how=how):
        source = watch()
        assert names(source) == [f"data_{i}.pt" for i in ORDER]
    assert source.documents == 8


def test_small_batches_keep_the_order(
    staged: Path, arriving: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(staged, arriving)
    monkeypatch.setattr(growing, "_MOST_FILES", 3)
    assert [len(batch) for batch in watch()] == [3, 3, 2]
    assert names(watch()) == [f"data_{i}.pt" for i in range(8)]


def test_a_killed_writer_is_an_error_after_the_timeout(
    staged: Path, arriving: Path, watch: Watch
) -> None:
    with writer_process(staged, arriving, pause_s=0.5) as writer:
        batches = iter(watch(patience=Patience(0.01, 10, 2)))
        next(batches)
        next(batches)
        writer.kill()
        with pytest.raises(DataError, match=r"found nothing new for 2 s, \d documents") as caught:
            list(batches)
    message = str(caught.value)
    assert str(arriving) in message
    assert "start it again" in message
    assert "remove .capture.json" in message


def test_a_writer_that_was_killed_and_goes_on_is_no_error(
    staged: Path, arriving: Path, watch: Watch
) -> None:
    with writer_process(staged, arriving, pause_s=0.2) as writer:
        batches = iter(watch())
        next(batches)
        writer.kill()
    fill(staged, arriving)
    found = {record.file for batch in batches for record in batch}
    assert len(found) == 7


def test_a_writer_that_never_begins_is_an_error(watch: Watch, arriving: Path) -> None:
    with pytest.raises(DataError, match=r"0 documents so far; .*\(no writer has begun\)"):
        list(watch(patience=IMPATIENT))
    assert not arriving.exists()


def test_training_for_long_is_no_timeout(staged: Path, arriving: Path, watch: Watch) -> None:
    """Time counts while somebody waits, not while a step is trained."""
    begin(arriving, staged / "data_0.pt")
    batches = iter(watch(patience=Patience(0.01, 10, 1)))
    next(batches)
    time.sleep(1.2)
    later = threading.Timer(0.1, shutil.copy, (staged / "data_1.pt", arriving / "data_1.pt"))
    later.start()
    [record] = next(batches)
    later.join()
    assert record.file == "data_1.pt"


def test_a_file_that_grows_is_a_sign_of_life(staged: Path, arriving: Path, watch: Watch) -> None:
    """Slower than the timeout as a whole, but never silent for so long."""
    content = (staged / "data_0.pt").read_bytes()
    pieces = [content[len(content) * i // 8 : len(content) * (i + 1) // 8] for i in range(8)]

    def trickle() -> None:
        with (arriving / "data_0.pt").open("wb") as file:
            for piece in pieces:
                file.write(piece)
                file.flush()
                time.sleep(0.2)
        (arriving / ".capture.json").unlink()

    begin(arriving)
    writer = threading.Thread(target=trickle)
    writer.start()
    assert names(watch(patience=Patience(0.01, 10, 1.2))) == ["data_0.pt"]
    writer.join()


def test_a_file_that_stays_cut_is_a_bad_sample(
    staged: Path, arriving: Path, watch: Watch, truncate: Callable[[Path], None]
) -> None:
    fill(staged, arriving)
    truncate(arriving / "data_3.pt")
    bad_samples = BadSamples(1)
    assert len(names(watch(bad_samples, patience=SOON_STALLED))) == 7
    [line] = bad_samples.lines
    assert "data_3.pt" in line
    with pytest.raises(DataError, match=r"1 bad samples, data\.max_bad_samples allows 0"):
        list(watch(patience=SOON_STALLED))


def test_states_of_another_dtype_are_a_bad_sample(
    staged: Path, arriving: Path, watch: Watch, document: Callable[..., Document]
) -> None:
    torch.save(document(9, seed=50, dtype=torch.float32), staged / "data_7.pt")
    fill(staged, arriving)
    bad_samples = BadSamples(1)
    assert len(names(watch(bad_samples, patience=SOON_STALLED))) == 7
    assert "found float32, expected bfloat16" in bad_samples.lines[0]


def test_states_of_other_sizes_stop_at_once(
    arriving: Path, watch: Watch, write: Callable[..., Path], document: Callable[..., Any]
) -> None:
    wide = document(9)
    wide["hidden_states"] = [torch.cat((state, state), dim=1) for state in wide["hidden_states"]]
    write(arriving, [wide])
    with pytest.raises(DataError, match="found hidden size 8, expected 4"):
        list(watch(BadSamples(5)))


def test_another_rank_may_see_a_file_later(staged: Path, arriving: Path, watch: Watch) -> None:
    """As on a shared disk that caches listings."""
    arriving.mkdir()
    answers = iter([["more", "data_0.pt"], ["end"]])
    copied = threading.Timer(0.1, shutil.copy, (staged / "data_0.pt", arriving / "data_0.pt"))
    copied.start()
    assert names(watch(rank=1, agree=lambda _: next(answers))) == ["data_0.pt"]
    copied.join()


def test_another_rank_that_never_sees_it_says_so(
    staged: Path, arriving: Path, watch: Watch
) -> None:
    fill(staged, arriving)
    source = watch(patience=IMPATIENT, rank=1, agree=lambda _: ["more", "data_9.pt"])
    with pytest.raises(DataError, match=r"data_9\.pt: cannot be read"):
        list(source)


def test_a_running_capture_declares_what_it_will_hold(arriving: Path, watch: Watch) -> None:
    facts = {"layer_ids": [1, 2, 3], "layer_id_convention": "after", "last_hidden": "post_norm"}
    begin(arriving)
    mark = arriving / ".capture.json"
    assert watch().declaration().declaration == Declaration()
    mark.write_text(json.dumps({"hidden_states": facts}))
    found = watch().declaration()
    assert found.file == ".capture.json"
    assert found.declaration == Declaration(
        (1, 2, 3), LayerIdConvention.after, LastHidden.post_norm
    )
