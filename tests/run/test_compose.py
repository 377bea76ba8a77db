"""From a composed tree to the frozen configuration, and what is said about mistakes in it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from eagle3.compose import Job, entry_point, load_config, save_config, to_config
from eagle3.config import Config, LossTerm
from eagle3.errors import ConfigError
from eagle3.names import Schedule


def test_a_tree_that_says_nothing_gives_the_schemas_defaults() -> None:
    assert to_config(OmegaConf.create({})) == Config()


def test_values_are_typed_and_frozen() -> None:
    tree = {"optim": {"schedule": "linear"}, "trainer": {"devices": [4, 5]}, "lr": 1}
    config = to_config(OmegaConf.create(tree))
    assert config.optim.schedule is Schedule.linear
    assert config.trainer.devices == [4, 5]
    assert isinstance(config.lr, float)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.optim.eps = 1.0  # type: ignore[misc]


def test_a_loss_mix_replaces_the_default_one() -> None:
    tree = {"loss": {"mix": [{"name": "ce", "weight": 0.3}, {"name": "kl"}]}}
    assert to_config(OmegaConf.create(tree)).loss.mix == [LossTerm("ce", 0.3), LossTerm("kl")]


def test_interpolations_are_resolved() -> None:
    assert (
        to_config(OmegaConf.create({"val": {"draft_steps": "${ttt_steps}"}})).val.draft_steps == 3
    )


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"ttt_step": 3}, ["unknown key 'ttt_step'", "'ttt_steps'"]),
        ({"optim": {"epss": 1}}, ["unknown key 'optim.epss'", "'optim.eps'"]),
        ({"num_workers": 2}, ["unknown key 'num_workers'", "'data.num_workers'"]),
        ({"optm": {"eps": 1}}, ["unknown key 'optm'", "'optim'"]),
        ({"loss": {"mix": [{"nme": "kl"}]}}, ["unknown key 'nme'", "'name'"]),
        ({"lr": "fast"}, ["lr", "'fast'", "Float"]),
        ({"epochs": 2.5}, ["epochs", "2.5", "Integer"]),
        ({"optim": {"schedule": "cosin"}}, ["optim.schedule", "'cosin'", "cosine, linear"]),
        ({"optim": 3}, ["OptimConfig", "3"]),
        ({"data": {"aux_layer_ids": ["a"]}}, ["data.aux_layer_ids[0]", "'a'"]),
        ({"lr": "${learning_rate}"}, ["lr", "learning_rate"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_mistakes_name_key_found_and_expected(tree: dict[str, object], said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        to_config(OmegaConf.create(tree))
    for part in said:
        assert part in str(caught.value)


def test_a_saved_configuration_reads_back_equal(tmp_path: Path) -> None:
    config = to_config(OmegaConf.create({"trainer": {"devices": [1, 3]}, "optim": {"eps": 1e-9}}))
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


def test_a_folder_without_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.yaml"):
        load_config(tmp_path / "config.yaml")


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Undo what an entry point does to its process: Hydra's logging and its environment."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    yield monkeypatch
    root.handlers[:], root.level = handlers, level


def never(config: Config, job: Job) -> float:
    raise AssertionError("a job must not begin with a wrong configuration")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("+foo.num_workers=1", ["unknown key 'foo'", "nearest valid key"]),
        ("+ttt_step=1", ["unknown key 'ttt_step'", "'ttt_steps'"]),
        ("noise=0.1", ["unknown key 'noise'", "'data.noise'"]),
        ("experiment=kimi_100", ["experiment=kimi_100 does not exist", "experiment=kimi_100k"]),
        ("experimen=kimi_100k", ["unknown key 'experimen'", "'experiment'"]),
        ("model=kimi", ["model=kimi does not exist", "model=kimi_k25", "smollm2"]),
        ("lr=fast", ["lr: ", "'fast'"]),
        ("lr==3", ["cannot read the override 'lr==3'"]),
        ("optim=3", ["must be a string"]),
    ],
)
def test_an_override_that_cannot_be_meant_ends_with_code_2(
    override: str,
    said: list[str],
    command_line: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command_line.setattr("sys.argv", ["train", override])
    with pytest.raises(SystemExit) as stop:
        raise SystemExit(entry_point(never))
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert all(part in printed.err for part in said)


def test_a_sweep_inside_ranks_is_refused(
    command_line: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command_line.setenv("RANK", "0")
    command_line.setattr("sys.argv", ["train", "-m", "seed=1,2"])
    assert entry_point(never) == 2
    assert "without torchrun" in capsys.readouterr().err
