"""Real runs on a tiny verifier: curves that repeat, checkpoints that load, errors that help."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from tests.helpers import TINY, make_document
from tests.tiny_run import (
    TinyWorld,
    clean_environment,
    curve,
    last_weights,
    make_world,
    some_documents,
    write_shards,
)

QUICK = ("max_seq_len=32", "epochs=2", "data.val_ratio=0.2", "noise_std=0.05")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    world = make_world(tmp_path_factory.mktemp("world"), some_documents(24))
    world.run(*QUICK)
    return world


def test_a_run_leaves_its_report(world: TinyWorld) -> None:
    folder = world.run_folders()[0]
    names = {path.name for path in folder.iterdir()}
    assert {
        "config.yaml",
        "provenance.json",
        "metrics.csv",
        "summary.json",
        "curves.png",
        "vocab_map.safetensors",
    } <= names
    assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["best/acceptance_replay"] == max(curve(folder, "val/acceptance_replay"))
    assert set(summary["references"]) == {"bigram", "trigram", "prompt lookup"}
    assert Path(summary["best/ckpt"]).is_file()


def test_steps_never_go_back_and_training_and_validation_share_them(world: TinyWorld) -> None:
    folder = world.run_folders()[0]
    steps = curve(folder, "trainer/global_step")
    assert steps == sorted(steps)
    assert curve(folder, "train/loss")[-1] < curve(folder, "train/loss")[0]
    assert len(curve(folder, "val/loss")) == 2


def test_a_checkpoint_holds_plain_values_and_no_frozen_tensor(world: TinyWorld) -> None:
    folder = world.run_folders()[0]
    checkpoint = torch.load(folder / "checkpoints" / "best.ckpt", weights_only=True)
    names = set(checkpoint["state_dict"])
    assert "drafter.fc.weight" in names
    assert "drafter.d2t" in names
    assert not any("embed_tokens" in name or name.startswith("head.") for name in names)
    assert checkpoint["eagle3"]["aux_layer_ids"] == [1, 2, 3]
    assert checkpoint["eagle3"]["config"]["model"]["hidden_size"] == TINY.hidden_size


def test_same_seed_same_curve_whatever_the_number_of_reader_threads(world: TinyWorld) -> None:
    world.run(*QUICK, "data.num_workers=3", "data.prefetch_windows=1")
    first, second = world.run_folders()[0], world.run_folders()[-1]
    for name in ("train/loss", "optim/grad_norm", "val/loss", "val/acceptance_replay"):
        assert curve(first, name) == curve(second, name)
    weights, others = last_weights(first), last_weights(second)
    assert all(torch.equal(weight, others[name]) for name, weight in weights.items())


def test_a_bad_sample_is_skipped_named_and_counted(tmp_path: Path) -> None:
    documents = some_documents(12)
    documents[4].aux_hidden[2, 3] = float("inf")
    world = make_world(tmp_path, documents)
    done = world.run("max_seq_len=16", "epochs=1", "data.val_ratio=0.1")
    assert "data_4.pt" in done.stdout
    (folder,) = world.run_folders()
    summary = json.loads((folder / "summary.json").read_text())
    assert len(summary["data/bad_samples"]) == 1
    assert "data_4.pt" in summary["data/bad_samples"][0]
    stopped = world.run("max_seq_len=16", "data.max_bad_samples=0", check=False)
    assert stopped.returncode == 2
    assert "data_4.pt" in stopped.stderr
    assert "data.max_bad_samples" in stopped.stderr


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("paths.shards=nowhere", ["nowhere"]),
        ("model.hidden_size=16", ["model.hidden_size=16", "set model.hidden_size=32"]),
        ("data.last_hidden=null", ["data.last_hidden=pre_norm"]),
        ("model.draft_vocab_size=16", ["vocab.safetensors", "20", "16"]),
        ("paths.vocab_map=null", ["paths.vocab_map is not set", "paths.vocab_map="]),
        ("ttt_step=4", ["ttt_step", "ttt_steps"]),
    ],
    ids=["shards", "width", "norm", "map size", "no map", "typo"],
)
def test_mistakes_are_one_message_without_a_traceback(
    world: TinyWorld, override: str, words: list[str]
) -> None:
    done = world.run(*QUICK, override, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_documents_longer_than_a_pack_are_split_without_loss(tmp_path: Path) -> None:
    documents = [make_document(40, seed) for seed in range(6)]
    world = make_world(tmp_path, documents)
    done = world.run("max_seq_len=24", "epochs=1", "data.val_ratio=0.2")
    assert "tokens lost 0" in done.stdout
    cut = world.run("max_seq_len=24", "epochs=1", "data.long_documents=truncate")
    assert "tokens lost 0" not in cut.stdout
    assert curve(world.run_folders()[-1], "data/tokens_lost")[-1] > 0


def test_a_run_that_diverges_says_so_and_stops(world: TinyWorld) -> None:
    done = world.run(*QUICK, "epochs=40", "lr=1e30", check=False)
    assert done.returncode == 2
    assert "left out: the gradient is not finite" in done.stdout
    assert "in 10 optimizer steps in a row" in done.stderr
    summary = json.loads((world.run_folders()[-1] / "summary.json").read_text())
    assert summary["exit_reason"] == "error: TrainingError"
    assert summary["optim/skipped_steps"] == 10


def test_an_interrupted_run_keeps_its_report(world: TinyWorld) -> None:
    """Ctrl-C after the first steps: a checkpoint, exit code 75, and the curve so far."""
    process = subprocess.Popen(
        world.command(*QUICK, "epochs=100000", "trainer.max_steps=100000"),
        stdout=subprocess.PIPE,
        text=True,
        cwd=world.root,
        env=clean_environment(),
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 3/"):
            process.send_signal(signal.SIGINT)
            break
    output, _ = process.communicate(timeout=120)
    assert process.returncode == os.EX_TEMPFAIL == 75
    assert "training: interrupted after" in output
    folder = world.run_folders()[-1]
    assert json.loads((folder / "summary.json").read_text())["exit_reason"] == "interrupted"
    assert (folder / "curves.png").is_file()
    assert list((folder / "checkpoints").glob("step*.ckpt"))


def test_validation_without_a_readable_row_is_not_measured(tmp_path: Path) -> None:
    documents = some_documents(6)
    world = make_world(tmp_path, documents)
    bad = some_documents(8)[7]
    bad.aux_hidden[3, 1] = float("nan")
    write_shards(tmp_path / "val", [bad])
    done = world.run("max_seq_len=16", "epochs=1", f"paths.val_shards={tmp_path / 'val'}")
    assert "val/data_0.pt" in done.stdout
    assert "quality:  not measured" in done.stdout
    (folder,) = world.run_folders()
    assert json.loads((folder / "summary.json").read_text())["best/acceptance_replay"] is None


def test_answers_of_one_token_have_no_acceptance_length(tmp_path: Path) -> None:
    """Two validations without a round: nothing to compare, and nothing to fail on."""
    documents = [make_document(12, seed, mask=[0] * 11 + [1]) for seed in range(12)]
    world = make_world(tmp_path, documents)
    done = world.run("max_seq_len=16", "epochs=2", "data.val_ratio=0.3")
    assert "acceptance nan" not in done.stdout
    assert "quality:  not measured" in done.stdout
    (folder,) = world.run_folders()
    assert len(curve(folder, "val/loss")) == 2
    assert json.loads((folder / "summary.json").read_text())["best/acceptance_replay"] is None


def test_files_that_go_while_training_are_left_out_of_the_references(tmp_path: Path) -> None:
    """One validation file and one training file vanish, another one is cut, after the plan."""
    world = make_world(tmp_path, some_documents(12))
    write_shards(tmp_path / "val", some_documents(18)[12:])
    process = subprocess.Popen(
        world.command(*QUICK, f"paths.val_shards={tmp_path / 'val'}"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=world.root,
        env=clean_environment(),
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("plan: "):
            (tmp_path / "val" / "data_1.pt").unlink()
            (tmp_path / "val" / "data_4.pt").write_bytes(b"PK")
            (tmp_path / "shards" / "data_3.pt").unlink()
            break
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, output + errors
    assert "left out of the references: 2 documents, first" in output
    assert "left out of the references: 1 documents, first" in output
    (folder,) = world.run_folders()
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary["references"]) == {"bigram", "trigram", "prompt lookup"}
    assert (folder / "curves.png").is_file()
