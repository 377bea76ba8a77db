"""Every YAML in conf/ composes through the schema; the real command line says what is wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from eagle3.checks import accumulate, check, device_count
from eagle3.compose import conf_dir, register_schema, to_config
from eagle3.config import Config, ModelConfig
from eagle3.names import CaptureSource, LmHeadInit, RopeType, Schedule
from tests.tiny_run import clean_environment

FILES = sorted(conf_dir().rglob("*.yaml"))
EXPERIMENTS = sorted(path.stem for path in (conf_dir() / "experiment").glob("*.yaml"))
OPTIONS = [
    f"{'+' * (path.parent.name == 'rehearsal')}{path.parent.relative_to(conf_dir())}={path.stem}"
    for path in FILES
    if path.parent != conf_dir() and path.parent.name != "experiment"
]
PATHS = ["paths.verifier=v", "paths.shards=s", "paths.vocab_map=m"]


@pytest.fixture(autouse=True)
def hydra() -> Iterator[None]:
    register_schema()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        yield


def composed(*overrides: str) -> Config:
    return to_config(compose("train", list(overrides)))


def test_the_plain_run_has_the_schemas_defaults() -> None:
    """One place of truth: what conf/ repeats for the reader is what eagle3/config.py says."""
    tree = compose("train")
    config = to_config(tree)
    assert tree.model.rope.theta == config.model.rope.theta
    OmegaConf.update(tree, "model", OmegaConf.structured(ModelConfig()))
    assert to_config(tree) == Config()


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes(option: str) -> None:
    assert isinstance(composed(option), Config)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_and_passes_the_checks(name: str) -> None:
    config = composed(f"experiment={name}", *PATHS)
    check(config)
    assert config.name == name


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(conf_dir())))
def test_files_are_short_and_say_what_they_are(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= (40 if path.parent == conf_dir() else 30)
    assert lines[0].startswith("#")
    if path.parent.name == "experiment":
        header = "\n".join(line for line in lines if line.startswith("#"))
        assert lines[0] == "# @package _global_"
        assert f"python -m eagle3.train experiment={path.stem}" in header


def assert_kimi(config: Config) -> None:
    model = config.model
    assert (model.hidden_size, model.vocab_size, model.draft_vocab_size) == (7168, 163840, 32000)
    assert (model.intermediate_size, model.head_dim) == (18432, 128)
    assert (model.num_attention_heads, model.num_key_value_heads) == (64, 64)
    assert (model.num_aux_layers, model.max_position_embeddings) == (3, 262144)
    assert (model.rope.theta, model.rope.type) == (1e6, RopeType.default)
    assert model.rms_norm_eps == 1e-6
    assert (config.lr, config.epochs) == (3e-5, 5)
    assert model.lm_head_init is LmHeadInit.verifier
    assert config.capture.source is CaptureSource.off


def test_kimi_10k_is_the_one_card_run() -> None:
    config = composed("experiment=kimi_10k")
    assert_kimi(config)
    assert config.max_seq_len == 2048
    assert device_count(config.trainer.devices) == 1


def test_kimi_100k_is_the_four_card_run() -> None:
    config = composed("experiment=kimi_100k")
    assert_kimi(config)
    assert (config.max_seq_len, config.ttt_steps, config.noise_std) == (4096, 3, 0.05)
    assert device_count(config.trainer.devices) == 4
    assert accumulate(config, 4) == 1
    assert (config.data.num_workers, config.data.val_ratio) == (4, 0.05)
    assert (config.optim.schedule, config.optim.warmup_ratio) == (Schedule.cosine, 0.01)


def test_cards_can_be_listed() -> None:
    config = composed("experiment=kimi_100k", "trainer.devices=[4,5,6,7]")
    assert config.trainer.devices == [4, 5, 6, 7]


def test_an_experiment_yields_to_the_command_line() -> None:
    config = composed("experiment=kimi_100k", "lr=1e-4", "max_seq_len=2048", "optim.eps=1e-6")
    assert (config.lr, config.max_seq_len, config.optim.eps) == (1e-4, 2048, 1e-6)


def test_the_demo_captures_the_outputs_of_layers_2_15_and_27() -> None:
    for name in ("smollm2_quickstart", "smollm2"):
        config = composed(f"experiment={name}")
        assert config.capture.aux_layer_ids == [3, 16, 28]
        assert config.model.rope.theta == 1e5


def train(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "eagle3.train", *overrides],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=clean_environment(),
        timeout=120,
    )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        pytest.param(["ttt_step=3"], ["'ttt_step'", "valid key is 'ttt_steps'"], id="single run"),
        pytest.param(["-m", "ttt_step=3,4"], ["'ttt_step'", "'ttt_steps'"], id="multirun"),
        pytest.param(
            ["experiment=kimi_100k"], ["paths.verifier is not set", "paths.shards is"], id="checks"
        ),
    ],
)
def test_a_mistake_on_the_command_line_is_one_message(
    tmp_path: Path, overrides: list[str], said: list[str]
) -> None:
    done = train(tmp_path, *overrides)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr.count("error:") == 1
    for part in said:
        assert part in done.stderr
    assert not list(tmp_path.glob("runs/*_lr*"))
