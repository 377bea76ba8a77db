"""The real command on a real run: verifier, captured states, training, export, and back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3.data.vocab import VocabMap
from eagle3.data.vocab_files import save_vocab_map
from eagle3.prefill import capture_sequences
from tests.tiny_run import TinyWorld, clean_environment
from tests.tiny_verifier import VOCAB, make_sequences, make_tiny_verifier

SIZES = ("model.vocab_size=100", "model.draft_vocab_size=40", "epochs=1", "max_seq_len=64")
LAYERS = ("data.aux_layer_ids=[1,2,3]", "data.layer_id_convention=entering")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    """A tiny Llama, its states, and a drafter trained on them."""
    root = tmp_path_factory.mktemp("world")
    make_tiny_verifier(root / "verifier")
    capture_sequences(root / "verifier", make_sequences(24), root / "shards",
                      aux_layer_ids=[1, 2, 3], batch_tokens=256, log=lambda _: None)  # fmt: skip
    (root / "verifier" / "tokenizer.json").unlink()  # nothing in it that a run could read
    selected = torch.arange(0, 80, 2)
    save_vocab_map(root / "vocab.safetensors", VocabMap.from_selected(selected, VOCAB))
    world = TinyWorld(root)
    world.run(*SIZES, "data.val_ratio=0.3")
    return world


@pytest.fixture(scope="module")
def checkpoint(world: TinyWorld) -> Path:
    return world.run_folders()[0] / "checkpoints" / "best.ckpt"


def export(folder: Path, *overrides: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "eagle3.export", *overrides],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=clean_environment(),
        timeout=300,
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_a_run_becomes_a_directory_and_begins_another_run(
    world: TinyWorld, checkpoint: Path, tmp_path: Path
) -> None:
    done = export(tmp_path, f"ckpt={checkpoint}", "dtype=float32")
    out = checkpoint.parent.parent / "export_both"
    assert "sglang: logits" in done.stdout
    assert "real states" in done.stdout
    assert "made-up" not in done.stdout
    assert f"written:  {out}" in done.stdout
    config = read(out / "config.json")
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    facts = read(out / "export.json")
    assert facts["verifier_class"] == "LlamaForCausalLM"
    assert facts["longest_trained"] <= 40
    assert facts["metrics"]["val/acceptance_replay"] >= 1
    weights, state = load_file(out / "model.safetensors"), torch.load(checkpoint)["state_dict"]
    for name, tensor in state.items():
        theirs = name.removeprefix("drafter.").replace("layer.", "midlayer.", 1)
        theirs = theirs if name.startswith("drafter.layer.") else name.removeprefix("drafter.")
        assert torch.equal(weights[theirs], tensor), name
    begun = world.run(*SIZES, f"paths.init={out}", "paths.vocab_map=null", "data.val_ratio=0.3")
    assert f"start: SpecForge head {out}" in begun.stdout
    assert "as the head was trained on" in begun.stdout


def test_the_other_form_begins_a_run_too(
    world: TinyWorld, checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    export(tmp_path, f"ckpt={checkpoint}", "target=speculators", f"out={out}")
    assert read(out / "config.json")["speculators_config"]["verifier"]["architectures"] == [
        "LlamaForCausalLM"
    ]
    begun = world.run(*SIZES, f"paths.init={out}", "paths.vocab_map=null")
    assert f"start: speculators head {out}" in begun.stdout


def test_without_verifier_and_shards_the_checkpoint_is_enough(
    world: TinyWorld, checkpoint: Path, tmp_path: Path
) -> None:
    """Both are away: what an engine needs was recorded by the run."""
    away = [world.root / "verifier", world.root / "shards"]
    for folder in away:
        folder.rename(folder.with_suffix(".away"))
    try:
        done = export(tmp_path, f"ckpt={checkpoint}", f"out={tmp_path / 'out'}")
    finally:
        for folder in away:
            folder.with_suffix(".away").rename(folder)
    assert "made-up states" in done.stdout
    assert read(tmp_path / "out" / "export.json")["verifier_class"] == "LlamaForCausalLM"


def test_an_untrained_drafter_to_try_serving(world: TinyWorld, tmp_path: Path) -> None:
    done = export(
        tmp_path, "dry_run=true", *SIZES[:2], *LAYERS, "model.hidden_size=32",
        f"paths.verifier={world.root / 'verifier'}", f"out={tmp_path / 'out'}",
    )  # fmt: skip
    assert "warning: untrained" in done.stdout
    assert (tmp_path / "out" / "README.md").read_text().startswith("# Untrained EAGLE-3 drafter")
    assert len(load_file(tmp_path / "out" / "model.safetensors")["d2t"]) == 40


def test_an_experiment_describes_the_untrained_drafter(tmp_path: Path) -> None:
    """Kimi's own shape is large; an eighth of it goes the same way, from config.json alone."""
    verifier = tmp_path / "verifier"
    verifier.mkdir()
    text = {"model_type": "kimi_k2", "hidden_size": 64, "vocab_size": 320,
            "num_hidden_layers": 61, "rms_norm_eps": 1e-5}  # fmt: skip
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    (verifier / "config.json").write_text(json.dumps(config))
    sizes = ("hidden_size=64", "vocab_size=320", "draft_vocab_size=64", "intermediate_size=64",
             "num_attention_heads=4", "num_key_value_heads=4", "head_dim=16")  # fmt: skip
    out = tmp_path / "out"
    done = export(
        tmp_path, "dry_run=true", "experiment=kimi_100k", f"paths.verifier={verifier}",
        *(f"model.{size}" for size in sizes), f"out={out}", "data.aux_layer_ids=[2,30,58]",
        "data.layer_id_convention=after",
    )  # fmt: skip
    found = read(out / "config.json")
    assert found["eagle_aux_hidden_state_layer_ids"] == [3, 31, 59]
    assert found["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [3, 31, 59]
    assert found["rope_theta"] == 1e6
    assert "no single file serves all releases" in done.stdout
    assert "no single file serves all releases" in (out / "README.md").read_text()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        pytest.param((), "found ckpt=None and dry_run=false", id="nothing"),
        pytest.param(("ckpt=CKPT", "dry_run=true"), "for an untrained one", id="both"),
        pytest.param(("ckpt=CKPT", "lr=1"), "found lr beside ckpt", id="other training"),
        pytest.param(("ckpt=none.ckpt",), "found no such file", id="no file"),
        pytest.param(("ckpt=CKPT", "target=sglan"), "expected one of", id="target"),
        pytest.param(("ckpt=CKPT", "min_sglang=0.5.8"), "rules are not known", id="release"),
        pytest.param(("ckpt=CKPT", "paths.verifier=OTHER"), "with 4, for which", id="verifier"),
        pytest.param(("ckpt=CKPT", "paths.verifier=WIDE"), "hidden_size=32, but", id="width"),
        pytest.param(("dry_run=true", "out=x"), "found no verifier", id="no verifier"),
    ],
)
def test_a_mistake_is_one_message_and_nothing_stays(
    checkpoint: Path, tmp_path: Path, overrides: tuple[str, ...], said: str
) -> None:
    other = tmp_path / "verifier"
    other.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 32, "vocab_size": 100,
              "num_hidden_layers": 5, "rms_norm_eps": 1e-5}  # fmt: skip
    if "paths.verifier=WIDE" in overrides:
        config |= {"num_hidden_layers": 4, "hidden_size": 64}
    (other / "config.json").write_text(json.dumps(config))
    place = {"CKPT": checkpoint, "OTHER": other, "WIDE": other}
    given = [f"{key}={place.get(v, v)}" for key, v in (o.split("=") for o in overrides)]
    done = export(tmp_path, *given, f"out={tmp_path / 'out'}", check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr
    assert done.stderr.count("error:") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["verifier"]
