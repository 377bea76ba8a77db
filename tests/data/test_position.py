"""The place in the plan, as checkpoints hold it."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3.data.batch import Window
from eagle3.data.datamodule import ShardDataModule
from eagle3.data.position import Position
from eagle3.errors import DataError
from eagle3.names import DataChange

Build = Callable[..., ShardDataModule]


@given(
    st.builds(
        Position,
        epoch=st.integers(0, 100),
        step=st.integers(0, 10**7),
        plan=st.text(max_size=40),
        data=st.text(max_size=16),
    )
)
def test_round_trip(position: Position) -> None:
    assert Position.from_dict(position.to_dict()) == position


def indices(windows: list[Window]) -> list[int]:
    return [pack.index for window in windows for pack in window.packs]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_rest_of_an_epoch_follows_from_the_position(
    shards: Path, build: Build, world_size: int
) -> None:
    for rank in range(world_size):
        data = build(shards, rank=rank, world_size=world_size)
        data.setup()
        plan, whole = data.epoch_plan(0), list(data.train_dataloader())
        for step in range(1, plan.steps):
            fresh = build(shards, rank=rank, world_size=world_size)
            position = Position.of(plan, 0, step, data.description.fingerprint)
            fresh.load_state_dict(position.to_dict())
            rest = fresh.train_dataloader()
            assert len(rest) == plan.steps
            found = list(rest)
            assert indices(found) == indices(whole[step:])
            assert [w.step for w in found] == [w.step for w in whole[step:]]
            for ours, theirs in zip(found, whole[step:], strict=True):
                for a, b in zip(ours.packs, theirs.packs, strict=True):
                    assert torch.equal(a.aux_hidden, b.aux_hidden)
            assert len(list(fresh.train_dataloader())) == plan.steps, "the next epoch is whole"


def test_a_finished_epoch_begins_anew(shards: Path, build: Build) -> None:
    data = build(shards)
    data.setup()
    plan = data.epoch_plan(0)
    ended = Position.of(plan, 0, plan.steps, "data")
    assert ended.first_step(0, plan, DataChange.refuse) == 0
    assert dataclasses.replace(ended, step=1).first_step(1, plan, DataChange.refuse) == 0


def test_other_data_and_other_plans_are_refused_unless_accepted(shards: Path, build: Build) -> None:
    data, other = build(shards), build(shards, seed=1)
    data.setup()
    other.setup()
    position = Position.of(data.epoch_plan(0), 0, 2, "before")
    with pytest.raises(DataError, match=r"fingerprint before, found after.*on_change=accept"):
        position.check("after", DataChange.refuse)
    position.check("after", DataChange.accept)
    with pytest.raises(DataError, match=r"plan of epoch 0 changed.*max_seq_len.*loss masks"):
        position.first_step(0, other.epoch_plan(0), DataChange.refuse)
    assert position.first_step(0, other.epoch_plan(0), DataChange.accept) == 2
