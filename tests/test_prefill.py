"""Capture to disk: the format, and that stops, restarts and mix-ups leave only whole files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3 import prefill
from eagle3.data.formats import open_store
from eagle3.data.index import index_records
from eagle3.data.layout import StateLayout
from eagle3.data.reading import StateReader
from eagle3.errors import ConfigError, DataError, UserError, VerifierError
from eagle3.names import LastHidden, LayerIdConvention
from eagle3.prefill import CaptureSummary, capture_sequences
from eagle3.tokens import TokenSequence
from eagle3.verifier.huggingface import HuggingFaceVerifier
from tests.tiny_verifier import VOCAB, make_sequences, make_tiny_verifier

ROOT = Path(__file__).parents[1]
LAYERS = [1, 2, 3]
KILLED = """
import sys
from pathlib import Path
from eagle3.prefill import capture_sequences
from tests.tiny_verifier import make_sequences
capture_sequences(Path(sys.argv[1]), make_sequences(400), Path(sys.argv[2]),
                  aux_layer_ids=[1, 2, 3], batch_tokens=64)
"""


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_verifier(tmp_path_factory.mktemp("verifier") / "tiny")


def capture(
    verifier: Path, sequences: Sequence[TokenSequence], directory: Path, **options: Any
) -> tuple[CaptureSummary, list[str]]:
    said: list[str] = []
    options = {"aux_layer_ids": LAYERS, "batch_tokens": 64, **options}
    return capture_sequences(verifier, sequences, directory, log=said.append, **options), said


def load(directory: Path, index: int) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(directory / f"data_{index}.pt", weights_only=True)
    return content


def assert_same_files(a: Path, b: Path, count: int) -> None:
    for index in range(count):
        one, two = load(a, index), load(b, index)
        assert torch.equal(one["input_ids"], two["input_ids"])
        assert torch.equal(one["loss_mask"], two["loss_mask"])
        pairs = zip(one["hidden_states"], two["hidden_states"], strict=True)
        assert all(torch.equal(x, y) for x, y in pairs)


def test_a_file_holds_ids_mask_and_compact_states(verifier: Path, tmp_path: Path) -> None:
    sequences = make_sequences(9)
    summary, said = capture(verifier, sequences, tmp_path)
    assert (summary.num_samples, summary.num_kept) == (9, 0)
    assert summary.num_captured_tokens == sum(len(s.ids) for s in sequences)
    assert "9 documents" in said[0]
    assert "free" in said[0]
    assert "(100%)" in said[-1]
    assert "tokens/s, 0:00 left" in said[-1]
    model = HuggingFaceVerifier(verifier)
    for index, sequence in enumerate(sequences):
        content = load(tmp_path, index)
        assert tuple(content["input_ids"].tolist()) == sequence.ids
        assert tuple(content["loss_mask"].tolist()) == sequence.loss_mask
        assert content["input_ids"].dtype == content["loss_mask"].dtype == torch.int64
        (states,) = model.capture([torch.tensor(sequence.ids)], LAYERS)
        stored = content["hidden_states"]
        for found, expected in zip(stored, (*states.aux, states.last), strict=True):
            assert found.dtype == torch.bfloat16
            assert found.untyped_storage().nbytes() == found.numel() * 2
            torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=1e-4)


def test_our_own_reader_needs_no_help(verifier: Path, tmp_path: Path) -> None:
    capture(verifier, make_sequences(3), tmp_path)
    store = open_store(tmp_path, StateLayout(3, 32, VOCAB))
    declared = store.declaration().declaration
    assert declared.aux_layer_ids == (1, 2, 3)
    assert declared.layer_id_convention is LayerIdConvention.entering
    assert declared.last_hidden is LastHidden.pre_norm
    assert len(store.files) == 3
    index = index_records([record for file in store.files for record in store.probe(file)])
    sample = StateReader(store, index).sample(2)
    assert torch.equal(sample.input_ids, load(tmp_path, 2)["input_ids"])


def test_the_config_says_whose_capture_it_is(verifier: Path, tmp_path: Path) -> None:
    capture(verifier, make_sequences(3), tmp_path, source="three.jsonl")
    config = json.loads((tmp_path / "data_config.json").read_text())
    assert config["model"]["target_model_path"] == str(verifier)
    assert (config["model"]["hidden_size"], config["model"]["dtype"]) == (32, "float32")
    assert config["data"]["train_data_path"] == "three.jsonl"
    assert config["hidden_states"]["layer_ids"] == LAYERS
    assert config["format"]["data_format_version"] == 1
    assert set(config["format"]["schema"]) == {"input_ids", "loss_mask", "hidden_states"}
    assert "torch" in config["reproducibility"]["package_versions"]
    assert not (tmp_path / ".capture.json").exists()


def test_a_complete_directory_is_left_alone(verifier: Path, tmp_path: Path) -> None:
    sequences = make_sequences(3)
    capture(verifier, sequences, tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    summary, said = capture(verifier, sequences, tmp_path)
    assert (summary.num_kept, summary.num_captured_tokens, said) == (3, 0, [])
    assert before == {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}


def test_kill_9_in_the_middle_then_again_gives_the_same_files(
    verifier: Path, tmp_path: Path
) -> None:
    killed, straight = tmp_path / "killed", tmp_path / "straight"
    sequences = make_sequences(400)
    command = [sys.executable, "-c", KILLED, str(verifier), str(killed)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and len(list(killed.glob("data_*.pt"))) < 5:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    done = len(list(killed.glob("data_*.pt")))
    assert 5 <= done < 400, "the kill came too late to show anything"
    assert not (killed / "data_config.json").exists()

    (killed / ".data_399.pt.tmp").write_bytes(b"half")
    summary, said = capture(verifier, sequences, killed)
    assert summary.num_kept == done
    assert f"{done} documents are there already" in said[0]
    assert sorted(path.suffix for path in killed.iterdir()).count(".tmp") == 0
    capture(verifier, sequences, straight)
    assert_same_files(killed, straight, 400)


def test_a_cut_file_of_a_stopped_capture_is_made_again(verifier: Path, tmp_path: Path) -> None:
    sequences, whole, stopped = make_sequences(6), tmp_path / "whole", tmp_path / "stopped"
    capture(verifier, sequences, whole)
    capture(verifier, sequences, stopped)
    (stopped / "data_config.json").rename(stopped / ".capture.json")
    (stopped / "data_2.pt").write_bytes((stopped / "data_2.pt").read_bytes()[:-100])
    (stopped / "data_4.pt").unlink()
    summary, _ = capture(verifier, sequences, stopped)
    assert summary.num_kept == 4
    assert_same_files(whole, stopped, 6)


def test_a_file_deleted_from_a_complete_directory_is_made_again(
    verifier: Path, tmp_path: Path
) -> None:
    sequences = make_sequences(4)
    capture(verifier, sequences, tmp_path)
    (tmp_path / "data_1.pt").unlink()
    summary, _ = capture(verifier, sequences, tmp_path)
    assert summary.num_kept == 3
    assert (tmp_path / "data_1.pt").exists()
    assert (tmp_path / "data_config.json").exists()


@pytest.mark.parametrize("state", ["complete", "stopped"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("layers", "hidden_states.layer_ids: found [1, 2, 3], wanted [0, 2]"),
        ("count", "data.num_samples: found 3, wanted 2"),
        ("tokens", "data.token_hash"),
        ("verifier", "model.weights_fingerprint"),
    ],
)
def test_another_capture_in_the_directory_is_refused(
    verifier: Path, tmp_path: Path, change: str, said: str, state: str
) -> None:
    shards, sequences = tmp_path / "shards", make_sequences(3)
    capture(verifier, sequences, shards)
    if state == "stopped":
        (shards / "data_config.json").rename(shards / ".capture.json")
    with pytest.raises(DataError) as error:
        capture(
            make_tiny_verifier(tmp_path / "tiny", seed=1) if change == "verifier" else verifier,
            {"count": sequences[:2], "tokens": make_sequences(3, 1)}.get(change, sequences),
            shards,
            aux_layer_ids=[0, 2] if change == "layers" else LAYERS,
        )
    assert said in str(error.value)
    assert f"{shards} holds another capture" in str(error.value)
    assert "Set paths.shards" in str(error.value)


def test_states_of_unknown_origin_are_not_continued(verifier: Path, tmp_path: Path) -> None:
    capture(verifier, make_sequences(3), tmp_path)
    (tmp_path / "data_config.json").unlink()
    with pytest.raises(DataError, match=r"data_\*\.pt but no data_config\.json"):
        capture(verifier, make_sequences(3), tmp_path)
    (tmp_path / "data_config.json").write_text("{")
    with pytest.raises(DataError, match=r"data_config\.json: not valid JSON"):
        capture(verifier, make_sequences(3), tmp_path)


def test_a_full_disk_is_foreseen(
    verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(prefill.shutil.disk_usage(tmp_path))
    monkeypatch.setattr(prefill.shutil, "disk_usage", lambda _: usage(10**9, 10**9, 1000))
    with pytest.raises(DataError, match=r"needs .* MB, found 0\.0 MB free.*capture\.num_samples"):
        capture(verifier, make_sequences(3), tmp_path)
    assert not list(tmp_path.glob("data_*.pt"))


class Wrong(NamedTuple):
    options: dict[str, Any]
    sequences: list[TokenSequence]
    error: type[UserError]
    said: str


@pytest.mark.parametrize(
    "case",
    [
        Wrong({"aux_layer_ids": []}, make_sequences(1), ConfigError, "capture.aux_layer_ids is []"),
        Wrong({"aux_layer_ids": [2, 1]}, make_sequences(1), ConfigError, "ascending"),
        Wrong({"aux_layer_ids": [1, 1]}, make_sequences(1), ConfigError, "ascending"),
        Wrong({"aux_layer_ids": [1, 5]}, make_sequences(1), ConfigError, "from 0 to 4"),
        Wrong({}, [TokenSequence((1, VOCAB), 1)], DataError, "document 0 of the token sequences"),
        Wrong({}, [TokenSequence((), 0)], DataError, "no ids"),
    ],
    ids=["no_layers", "descending", "twice", "past_end", "id_past_vocab", "empty"],
)
def test_an_impossible_request_is_refused_before_anything_is_written(
    verifier: Path, tmp_path: Path, case: Wrong
) -> None:
    with pytest.raises(case.error) as error:
        capture(verifier, case.sequences, tmp_path / "shards", **case.options)
    assert case.said in str(error.value)
    assert not (tmp_path / "shards").exists()


def test_states_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    broken = make_tiny_verifier(tmp_path / "tiny")
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"].fill_(float("nan"))
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(VerifierError, match=r"data_\d\.pt: not written, NaN or inf"):
        capture(broken, make_sequences(2), tmp_path / "shards")
    assert not list((tmp_path / "shards").glob("data_*.pt"))
