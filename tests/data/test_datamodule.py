"""The data module and its loader on real directories."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from eagle3.data.batch import PackedBatch, Window
from eagle3.data.datamodule import ShardDataModule
from eagle3.data.declaration import Declaration
from eagle3.errors import ConfigError, DataError
from eagle3.names import LastHidden, LayerIdConvention, LongDocuments, ReadMode
from tests.data.windows import chain_starts, reader_threads, windows

Make = Callable[..., dict[str, Any]]
Write = Callable[..., Path]
Build = Callable[..., ShardDataModule]
TENSORS = (
    "input_ids",
    "next_ids",
    "aux_hidden",
    "last_hidden",
    "loss_mask",
    "document_ids",
    "position_ids",
    "start_mask",
)


def equal(a: PackedBatch, b: PackedBatch) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in TENSORS) and (
        (a.document_lengths, a.epoch, a.index) == (b.document_lengths, b.epoch, b.index)
    )


def test_every_training_row_comes_once_an_epoch(shards: Path, build: Build) -> None:
    found = windows(build(shards, val_ratio=0.0))
    expected = []
    for path in shards.iterdir():
        states = torch.load(path, weights_only=True)["hidden_states"][:-1]
        expected += torch.cat(states, dim=1)[:-1].float().tolist()
    assert chain_starts(found) == sorted(map(tuple, expected))
    assert all(len(pack) == 16 for window in found for pack in window.packs)


def test_windows_say_what_was_read(shards: Path, build: Build) -> None:
    data = build(shards)
    for window in windows(data):
        rows = sum(pack.num_rows for pack in window.packs)
        gated = sum(int(pack.loss_mask.sum()) for pack in window.packs)
        assert 0 < gated <= rows
        assert window.read_bytes == (rows * 3 + gated) * 4 * 2, "last states for a loss only"
        assert window.wait_s >= 0
        assert window.bad_samples == ()


@pytest.mark.parametrize(
    ("num_workers", "prefetch_windows"), [(1, 0), (1, 3), (4, 1), (7, 9)], ids=str
)
def test_threads_change_nothing(
    shards: Path, build: Build, num_workers: int, prefetch_windows: int
) -> None:
    reference = windows(build(shards, accumulate=2))
    found = windows(
        build(shards, accumulate=2, num_workers=num_workers, prefetch_windows=prefetch_windows)
    )
    assert [w.step for w in found] == list(range(len(reference)))
    for ours, theirs in zip(found, reference, strict=True):
        assert all(equal(a, b) for a, b in zip(ours.packs, theirs.packs, strict=True))


@pytest.mark.parametrize("read_mode", [ReadMode.auto, ReadMode.direct])
def test_ways_of_reading_change_nothing(shards: Path, build: Build, read_mode: ReadMode) -> None:
    reference = windows(build(shards, read_mode=ReadMode.buffered))
    found = windows(build(shards, read_mode=read_mode))
    for ours, theirs in zip(found, reference, strict=True):
        assert ours.read_bytes == theirs.read_bytes
        assert all(equal(a, b) for a, b in zip(ours.packs, theirs.packs, strict=True))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_two_ranks_share_what_one_rank_does(shards: Path, build: Build, accumulate: int) -> None:
    alone = windows(build(shards, accumulate=2 * accumulate))
    ranks = [
        windows(build(shards, accumulate=accumulate, rank=rank, world_size=2)) for rank in range(2)
    ]
    assert len(alone) == len(ranks[0]) == len(ranks[1])
    for one, first, second in zip(alone, *ranks, strict=True):
        together = {pack.index: pack for pack in (*first.packs, *second.packs)}
        assert len(first.packs) == len(second.packs) == accumulate
        assert set(together) == {pack.index for pack in one.packs}
        assert all(equal(pack, together[pack.index]) for pack in one.packs)


def test_packs_that_run_out_are_empty_and_alike(shards: Path, build: Build) -> None:
    data = build(shards, accumulate=3, world_size=2, rank=1)
    last = windows(data)[-1]
    packs = len(data.epoch_plan(0).packs)
    assert packs % 6, "the last window is partial"
    empty = [pack for pack in last.packs if pack.index >= packs]
    assert empty
    for pack in empty:
        assert pack.num_rows == 0
        assert pack.aux_hidden.dtype is torch.bfloat16
        assert pack.aux_hidden.shape == (16, 12)


def test_epochs_differ_in_order_only(shards: Path, build: Build) -> None:
    data = build(shards)
    data.setup()
    first, second = data.epoch_plan(0), data.epoch_plan(1)
    assert first.packs != second.packs
    assert {s for pack in first.packs for s in pack} == {s for pack in second.packs for s in pack}
    assert data.epoch_plan(0).packs == first.packs
    assert data.steps_in_epoch(1) == second.steps
    assert data.total_steps(2) == first.steps + second.steps


class Recorder(lightning.LightningModule):
    """Keeps the epoch and place of every pack that the trainer hands over."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.trained: list[tuple[int, int]] = []
        self.validated: list[int] = []

    def training_step(self, window: Window) -> torch.Tensor:
        self.trained += [(pack.epoch, pack.index) for pack in window.packs]
        return self.weight.sum()

    def validation_step(self, window: Window) -> None:
        self.validated += [pack.index for pack in window.packs]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # inside Lightning
def test_trainer_gets_the_plan_of_its_epoch(shards: Path, build: Build, tmp_path: Path) -> None:
    data, module = build(shards), Recorder()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=2,
        use_distributed_sampler=False,
        reload_dataloaders_every_n_epochs=1,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=CSVLogger(tmp_path),
        log_every_n_steps=1,
    )
    trainer.fit(module, datamodule=data)
    expected = [(e, i) for e in range(2) for i in range(data.steps_in_epoch(e))]
    assert module.trained == expected
    assert module.validated == 2 * list(range(data.val_report.steps))
    assert not reader_threads()


def test_threads_end_with_an_early_stop(shards: Path, build: Build) -> None:
    data = build(shards, max_seq_len=31)
    data.setup()
    for _ in data.train_dataloader():
        assert reader_threads()
        break
    assert not reader_threads()


def test_validation_is_the_same_for_every_seed_and_number_of_ranks(
    shards: Path, build: Build
) -> None:
    def validated(**changes: Any) -> list[tuple[float, ...]]:
        data = build(shards, **changes)
        data.setup()
        loader = data.val_dataloader()
        found = list(loader)
        assert len(found) == len(loader) == data.val_report.steps
        assert all(len(window.packs) == 1 for window in found)
        return chain_starts(found)

    reference = validated()
    assert reference
    assert validated(seed=9, max_seq_len=11, ttt_steps=1, accumulate=4) == reference
    ranks = [validated(rank=rank, world_size=3) for rank in range(3)]
    assert sorted(row for found in ranks for row in found) == reference
    trained = chain_starts(windows(build(shards)))
    assert not set(reference) & set(trained)


def test_siblings_of_a_prompt_stay_together(
    tmp_path: Path, document: Make, write: Write, build: Build
) -> None:
    documents = []
    for prompt in range(8):
        for answer in range(3):
            sibling = document(12, seed=prompt, prompt=5)
            sibling["input_ids"][5:] = (sibling["input_ids"][5:] + answer) % 50
            documents.append(sibling)
    data = build(write(tmp_path / "s", documents), val_ratio=0.4)
    data.setup()
    assert data.val_report.documents % 3 == data.report.documents % 3 == 0
    assert data.val_report.documents
    assert data.report.documents + data.val_report.documents == 24


def test_long_validation_documents_are_split_for_the_draft_steps(
    tmp_path: Path, document: Make, write: Write, build: Build
) -> None:
    data = build(
        write(tmp_path / "s", [document(6, 0)]),
        val_directory=write(tmp_path / "v", [document(40, 1, prompt=0)]),
        val_max_seq_len=20,
        draft_steps=4,
    )
    data.setup()
    packs = [window.packs[0].trim() for window in data.val_dataloader()]
    starts = [pack.position_ids[pack.start_mask].tolist() for pack in packs]
    assert starts == [list(range(17)), list(range(17, 30)), list(range(30, 39))]
    assert [len(pack) for pack in packs] == [20, 20, 13]


def test_explicit_validation_directory(
    tmp_path: Path, shards: Path, document: Make, write: Write, build: Build
) -> None:
    data = build(shards, val_directory=write(tmp_path / "v", [document(9, 50), document(9, 51)]))
    data.setup()
    assert data.report.documents == 20
    assert data.val_report.documents == 2


def test_validation_of_other_states_is_refused(
    tmp_path: Path, document: Make, write: Write, build: Build
) -> None:
    def config(*ids: int) -> dict[str, Any]:
        return {
            "hidden_states": {
                "layer_ids": list(ids),
                "layer_id_convention": "entering",
                "last_hidden": "pre_norm",
            }
        }

    data = build(
        write(tmp_path / "s", [document(9)], config(2, 15, 27)),
        val_directory=write(tmp_path / "v", [document(9, 1)], config(3, 16, 28)),
        declaration=Declaration(),
    )
    with pytest.raises(DataError, match=r"layers \[3, 16, 28\].*expected \[2, 15, 27\]"):
        data.setup()


def test_description(shards: Path, build: Build) -> None:
    declared = Declaration((1, 14, 26), LayerIdConvention.after, LastHidden.post_norm)
    data = build(shards, declaration=declared, max_samples=7)
    data.setup()
    description = data.description
    assert description.aux_layer_ids == (2, 15, 27)
    assert description.last_hidden is LastHidden.post_norm
    assert (description.num_aux_layers, description.hidden_size) == (3, 4)
    assert description.num_documents == 7
    assert set(description.declared_by.values()) == {"config"}


def test_undeclared_states_stop_before_anything_is_read(tmp_path: Path, build: Build) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "data_0.pt").write_bytes(b"never opened")
    with pytest.raises(DataError, match=r"data\.last_hidden"):
        build(tmp_path / "s", declaration=Declaration()).setup()


def test_sample_batch_takes_the_first_documents(
    tmp_path: Path, document: Make, write: Write, build: Build
) -> None:
    documents = [document(10, seed) for seed in range(3)]
    data = build(write(tmp_path / "s", documents), val_ratio=0.0)
    data.setup()
    batch = data.sample_batch(max_rows=12)
    assert batch.document_ids.tolist() == [0] * 9 + [1] * 3
    assert torch.equal(batch.input_ids[:9], documents[0]["input_ids"][1:])
    assert batch.loss_mask[9:].tolist() == [False, False, True]
    assert torch.equal(batch.last_hidden[11], documents[1]["hidden_states"][3][3])
    assert len(data.sample_batch(max_rows=1000)) == 27


def test_capture_runs_only_where_files_are_missing(
    tmp_path: Path, document: Make, write: Write, build: Build
) -> None:
    calls: list[int] = []

    def capture() -> None:
        calls.append(1)
        write(tmp_path / "s", [document(9, seed) for seed in range(4)])

    data = build(tmp_path / "s", capture=capture)
    data.prepare_data()
    data.prepare_data()
    data.setup()
    build(tmp_path / "s", capture=capture).prepare_data()
    assert calls == [1]
    assert data.description.num_documents == 4


@pytest.mark.parametrize(
    ("long_documents", "rows", "lost"),
    [
        pytest.param(LongDocuments.split, 8 + 29, 0, id="split"),
        pytest.param(LongDocuments.truncate, 8 + 16, 13, id="truncate"),
        pytest.param(LongDocuments.drop, 8, 29, id="drop"),
    ],
)
def test_long_documents_follow_the_setting(
    tmp_path: Path,
    document: Make,
    write: Write,
    build: Build,
    long_documents: LongDocuments,
    rows: int,
    lost: int,
) -> None:
    shards = write(tmp_path / "s", [document(9, 0), document(30, 1, prompt=1)])
    data = build(shards, val_ratio=0.0, long_documents=long_documents)
    assert len(chain_starts(windows(data))) == rows
    assert data.report.lost_tokens == lost
    assert data.report.long_documents == 1


def test_nothing_left_to_train_on(
    tmp_path: Path, document: Make, write: Write, build: Build
) -> None:
    data = build(
        write(tmp_path / "s", [document(30)]), val_ratio=0.0, long_documents=LongDocuments.drop
    )
    with pytest.raises(DataError, match=r"data\.long_documents=drop"):
        data.setup()


def test_interrupted_capture_goes_on(
    tmp_path: Path, document: Make, write: Write, build: Build
) -> None:
    shards = write(tmp_path / "s", [document(9)])
    started = shards / ".capture.json"
    started.write_text("{}")

    def capture() -> None:
        write(shards, [document(9, seed) for seed in range(4)])
        started.unlink()

    with pytest.raises(DataError, match="interrupted"):
        build(shards).prepare_data()
    data = build(shards, capture=capture)
    data.prepare_data()
    assert data.description.num_documents == 4


def test_no_validation_is_possible(shards: Path, build: Build) -> None:
    data = build(shards, val_ratio=0.0)
    data.setup()
    assert list(data.val_dataloader()) == []
    assert data.val_report.documents == 0


def test_reader_threads_are_needed(shards: Path, build: Build) -> None:
    with pytest.raises(ConfigError, match=r"data\.num_workers"):
        build(shards, num_workers=0)
