"""A rehearsal is the experiment's own run, made narrow; what is made up behaves as captures do."""

from __future__ import annotations

import csv
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3.checks import accumulate, check, check_paths, device_count
from eagle3.compose import compose_config, conf_dir
from eagle3.config import Config, ModelConfig, RehearsalConfig
from eagle3.errors import ConfigError
from eagle3.model.verifier_head import VerifierHead
from eagle3.model.weights import load_verifier_weights
from eagle3.names import LastHidden
from eagle3.rehearsal import with_group
from eagle3.rehearsing.comparison import differences, last_step
from eagle3.rehearsing.lengths import outlines, typical
from eagle3.rehearsing.reduction import narrowed, reduced
from eagle3.rehearsing.staging import stage
from eagle3.rehearsing.table import table_lines
from eagle3.rehearsing.world import World, made_up_ids, made_up_states, world_name
from tests.tiny_run import OVERRIDES, clean_environment, make_world, some_documents

EXPERIMENTS = sorted(path.stem for path in (conf_dir() / "experiment").glob("*.yaml"))


def experiment(name: str, folder: Path, *overrides: str) -> Config:
    places = (f"paths.cache={folder / 'cache'}", f"paths.output={folder / 'runs'}")
    small = ("+rehearsal=cpu", "rehearsal.samples=4")
    return compose_config([f"experiment={name}", *small, *places, *overrides])


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_can_be_rehearsed(name: str, tmp_path: Path) -> None:
    config = experiment(name, tmp_path)
    staged = stage(config).config
    check(staged)
    check_paths(staged)
    assert staged.name == f"{name}_rehearsal"
    assert device_count(staged.trainer.devices) == device_count(config.trainer.devices)
    kept = ("lr", "max_seq_len", "ttt_steps", "noise_std", "tokens_per_step", "seed", "resume")
    assert all(getattr(staged, key) == getattr(config, key) for key in kept)
    assert (staged.compute, staged.loss, staged.val) == (config.compute, config.loss, config.val)
    assert replace(staged.optim, pull_to_start=config.optim.pull_to_start) == config.optim


def test_kimi_100k_is_rehearsed_at_a_64th_of_its_width() -> None:
    config = compose_config(["experiment=kimi_100k", "+rehearsal=cpu"])
    model = reduced(config).model
    assert (model.hidden_size, model.intermediate_size) == (7168 // 64, 18432 // 64)
    assert (model.vocab_size, model.draft_vocab_size) == (163840 // 64, 32000 // 64)
    assert model.num_attention_heads * model.head_dim == 64 * 128 // 64
    assert config.rehearsal.samples <= 300
    assert accumulate(reduced(config), 4) == accumulate(config, 4)


@given(
    st.builds(
        ModelConfig,
        hidden_size=st.integers(1, 9000),
        vocab_size=st.integers(200_000, 300_000),
        draft_vocab_size=st.integers(1, 200_000),
        intermediate_size=st.integers(1, 30_000),
        num_attention_heads=st.sampled_from([8, 16, 64, 128]),
        num_key_value_heads=st.sampled_from([1, 2, 8]),
        head_dim=st.integers(1, 128).map(lambda half: 2 * half),
    ),
    st.integers(1, 4096),
)
def test_a_narrowed_drafter_is_always_one_that_can_be_built(
    model: ModelConfig, divisor: int
) -> None:
    small = narrowed(model, divisor)
    paths = replace(Config().paths, verifier=".", shards=".", vocab_map=".")
    check(Config(model=small, paths=paths))
    assert small.num_attention_heads * model.num_key_value_heads == (
        small.num_key_value_heads * model.num_attention_heads
    )
    assert small.vocab_size <= model.vocab_size


def test_typical_lengths_have_the_known_mean() -> None:
    lengths = typical(20_000, np.random.default_rng(0)).lengths
    assert lengths.mean() == pytest.approx(2353, rel=0.03)
    assert lengths.min() >= 29
    assert lengths.max() <= 8192


def test_documents_take_lengths_and_masks_of_real_ones(tmp_path: Path) -> None:
    documents = [*some_documents(3, 14), *some_documents(4, 23)]
    world = make_world(tmp_path, documents)
    paths = (f"paths.shards={world.root / 'shards'}", f"paths.cache={tmp_path / 'cache'}")
    config = compose_config([*OVERRIDES, *paths, "+rehearsal=cpu", "rehearsal.samples=5"])
    drawn = outlines(config)
    assert len(drawn) == 5
    real = {tuple(document.loss_mask.int().tolist()) for document in documents}
    for number, length in enumerate(drawn.lengths.tolist()):
        assert tuple(drawn.runs.mask(number, length).astype(int).tolist()) in real
    assert "7 samples" in drawn.origin
    everything = replace(config, rehearsal=RehearsalConfig(samples=300))
    assert sorted(outlines(everything).lengths.tolist()) == [14] * 3 + [23] * 4


def test_the_made_up_verifier_says_the_next_token(tmp_path: Path) -> None:
    config = stage(experiment("kimi_100k", tmp_path)).config
    assert config.paths.verifier is not None
    weights = load_verifier_weights(Path(config.paths.verifier), torch.float32)
    head = VerifierHead(weights.norm, weights.head, eps=1e-6, last_hidden=LastHidden.pre_norm)
    directions = weights.head / weights.norm
    directions *= 112**0.5 / directions.norm(dim=-1, keepdim=True)
    ids = torch.from_numpy(made_up_ids(900, 2560, (0, 7)))
    aux, last = made_up_states(ids, directions, 3, (0, 7))
    assert aux.shape == (900, 3 * 112)
    assert torch.equal(head(last[:-1].float()).argmax(-1), ids[1:])
    faint = head(aux[:-2, :112].float()).argmax(-1) == ids[2:]
    assert 0.2 < faint.double().mean() < 0.9, "some drafts are right without training"


@given(st.integers(1, 300), st.integers(2, 5000), st.integers(0, 99))
def test_made_up_ids_are_tokens_and_mostly_successors(length: int, vocab: int, seed: int) -> None:
    ids = made_up_ids(length, vocab, (seed, 0))
    assert ids.shape == (length,)
    assert ((ids >= 0) & (ids < vocab)).all()
    assert (ids == made_up_ids(length, vocab, (seed, 0))).all()
    if length >= 100:
        assert ((ids[1:] - ids[:-1]) % vocab == 1).mean() > 0.5


def test_the_same_rehearsal_finds_its_files_again(tmp_path: Path) -> None:
    config = experiment("kimi_100k", tmp_path)
    first, second = stage(config), stage(config)
    assert first.config == second.config
    drawn, model = first.drawn, first.config.model
    names = {
        world_name(model, drawn, 0),
        world_name(model, drawn, 1),
        world_name(replace(model, hidden_size=120), drawn, 0),
        world_name(model, typical(4, np.random.default_rng(1)), 0),
    }
    assert len(names) == 4
    root = tmp_path / "cache" / "rehearsal" / world_name(model, drawn, config.seed)
    assert World(root).is_complete
    assert first.config.paths.shards == str(root / "shards")


def test_the_table_says_what_is_left_out(tmp_path: Path) -> None:
    config = experiment("kimi_finetune", tmp_path, "epochs=3", "rehearsal.epochs=1")
    lines = table_lines(config, stage(config))
    assert lines[0].split(" | ")[1] == "not rehearsed"
    text = " ".join(line.partition("|")[2].strip() for line in lines)
    for left_out in ("CUDA", "NCCL", "real memory", "the start from paths.init", "3 epochs"):
        assert left_out in text
    assert "capture" not in text
    demo = experiment("smollm2", tmp_path)
    assert any("the capture" in line for line in table_lines(demo, stage(demo)))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        pytest.param("rehearsal.samples=0", "rehearsal.samples=0", id="no_samples"),
        pytest.param("rehearsal.width_divisor=0", "rehearsal.width_divisor=0", id="no_width"),
        pytest.param("tokens_per_step=5000", "tokens_per_step=5000", id="of_the_experiment"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_written(
    override: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        stage(experiment("kimi_100k", tmp_path, override))
    assert not list(tmp_path.iterdir())


def a_run(folder: Path, *, weight: float = 1.0, loss: str = "3.5", rows: int = 2) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    state = {"state_dict": {"drafter.fc.weight": torch.tensor([weight])}}
    torch.save(state, folder / "checkpoints" / "step00000002.ckpt")
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["trainer/global_step", "train/loss", "perf/eta_h"])
        writer.writerows([step, loss, folder.name] for step in range(1, rows + 1))
    return folder


def test_differences_between_runs_are_named(tmp_path: Path) -> None:
    whole = a_run(tmp_path / "whole")
    assert last_step(whole) == 2
    assert last_step(tmp_path) == 0
    assert differences(a_run(tmp_path / "same"), whole) == []
    next_float = float(torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)))
    (weights,) = differences(a_run(tmp_path / "weights", weight=next_float), whole)
    assert "final weights: drafter.fc.weight" in weights
    (metrics,) = differences(a_run(tmp_path / "metrics", loss="3.25"), whole)
    assert metrics == "row 1 of the metrics: train/loss"
    noise = a_run(tmp_path / "noise", weight=next_float, loss="3.500001")
    assert differences(noise, whole, 1e-6) == []
    assert len(differences(noise, whole, 1e-8)) == 2
    (count,) = differences(a_run(tmp_path / "rows", rows=3), whole)
    assert count == "3 rows of metrics instead of 2"


def test_the_group_is_added_where_it_is_missing() -> None:
    assert with_group(["lr=1"]) == ("+rehearsal=cpu", "lr=1")
    assert with_group(["+rehearsal=cpu", "lr=1"]) == ("+rehearsal=cpu", "lr=1")


def test_a_failed_run_ends_the_rehearsal_with_its_status(tmp_path: Path) -> None:
    done = rehearse(tmp_path, "rehearsal.samples=0")
    assert done.returncode == 2
    assert "rehearsal.samples=0: expected a value >= 1" in done.stderr
    assert "ended with exit status 2, expected 0" in done.stderr


def test_kimi_100k_killed_and_stopped_ends_as_the_whole_run(tmp_path: Path) -> None:
    """On one rank; with four, and in its own length: ``make rehearsal``."""
    done = rehearse(
        tmp_path,
        "rehearsal.samples=6",
        "rehearsal.checkpoint_every_steps=2",
        "max_seq_len=1024",
        "val.max_seq_len=1024",
        "data.val_ratio=0.2",
        "trainer.devices=1",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "final weights equal to the bit, every metric too, at every step" in done.stdout
    assert "argmax = next token on 100.0%" in done.stdout
    assert done.stdout.count("goes on after step") == 2
    assert "1 rank(s)  " in done.stdout
    folders = list((tmp_path / "runs").glob("rehearsal_*/*/kimi_100k_rehearsal_*"))
    assert sorted(folder.parent.name for folder in folders) == ["interrupted", "whole"]


def rehearse(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    own = ("experiment=kimi_100k", "logger.wandb=disabled", *overrides)
    return subprocess.run(
        [sys.executable, "-m", "eagle3.rehearsal", *own],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=clean_environment(),
        timeout=590,
    )
