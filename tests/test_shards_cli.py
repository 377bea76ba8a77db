"""``python -m eagle3.shards`` as a process: exit codes, files, what goes to which stream."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eagle3.shards import main
from eagle3.shards_commands.options import as_options
from tests.inspection.planted import CONFIG, VOCAB, capture, make_verifier, save


def shards(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "eagle3.shards", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def here(*arguments: str | Path) -> int:
    """The same without a process, which takes seconds to start."""
    return main([str(argument) for argument in arguments])


@pytest.fixture
def verifier(tmp_path: Path) -> Path:
    return make_verifier(tmp_path / "verifier")


def test_inspect_a_sound_directory(tmp_path: Path, verifier: Path) -> None:
    directory = save(tmp_path / "sound", capture(), CONFIG)
    report, figure = tmp_path / "out" / "audit.json", tmp_path / "out" / "audit.png"
    done = shards(
        *("inspect", directory, "--verifier", verifier, "--cache", tmp_path / "cache"),
        *("--max-seq-len", "128,256", "--json", report, "--figure", figure, "--show", 2),
    )
    assert done.returncode == 0, done.stderr
    assert "STOP" not in done.stdout
    assert done.stdout.count("supervised tokens marked:") == 2
    assert "verifier's head:" in done.stderr
    facts = json.loads(report.read_text())
    assert facts["json_version"] == 1
    assert facts["directory"]["path"] == str(directory)
    assert {finding["severity"] for finding in facts["findings"]} == {"ok"}
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_inspect_exits_with_1_at_a_stop(tmp_path: Path, verifier: Path) -> None:
    documents = capture()
    documents[0]["hidden_states"][1][3] = float("nan")
    directory = save(tmp_path / "broken", documents)
    done = shards(
        *("inspect", directory, "--verifier", verifier, "--cache", tmp_path / "cache"),
        *("--aux-layer-ids", "1,3,5", "--layer-id-convention", "after"),
        *("--last-hidden", "pre_norm", "--samples", 12),
    )
    assert done.returncode == 1, done.stderr
    assert "STOP     finite states" in done.stdout
    assert "entering [2, 4, 6] (command line)" in done.stdout


def test_inspect_exits_with_2_and_one_message(tmp_path: Path) -> None:
    done = shards("inspect", tmp_path / "missing")
    assert done.returncode == 2
    assert "missing: found no such directory" in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["inspect", "."], "error: .: found an empty directory, expected manifest.json or"),
        (["inspect", ".", "--val-ratio", "2"], "error: --val-ratio: found 2, expected a share"),
        (["inspect", ".", "--show", "-1"], "argument --show: found '-1', expected a whole number"),
        (["verify", ".", "--sample", "-1"], "argument --sample: found '-1', expected a whole"),
        (["verify", ".", "--num-workers", "0"], "argument --num-workers: found '0', expected"),
        (["convert", ".", "out", "--max-samples", "0"], "argument --max-samples: found '0'"),
        (["convert", ".", "out", "--max-samples", "few"], "argument --max-samples: found 'few'"),
        (["vocab", ".", "--write", "8kB", "--out", "a.safetensors"], "found '8kB', expected a"),
        (["vocab", ".", "--sizes", "0"], "argument --sizes: found '0', expected a size such as"),
        (["vocab", ".", "--write", "8k", "--out", "a.pt"], "error: --out: found a.pt, expected"),
        (["inspect", ".", "--train-on", "everything"], "invalid choice: 'everything'"),
        (["inspect", ".", "--max-seq-len", "2k"], "found '2k', expected whole numbers"),
        (["convert", "missing", "out"], "error: missing: found no such directory"),
        (["verify", "missing"], "error: missing: found no such directory"),
        (["nothing"], "invalid choice: 'nothing'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_is_refused(
    tmp_path: Path,
    arguments: list[str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code: object = here(*arguments)
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert expected in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_convert_verify_inspect_and_count_one_directory(
    tmp_path: Path, verifier: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, native = save(tmp_path / "source", capture(), CONFIG), tmp_path / "native"
    cache = ("--cache", tmp_path / "cache")
    for arguments in (
        ("convert", source, native, "--verifier", verifier, *cache),
        ("verify", native, *cache),
        ("inspect", native, "--verifier", verifier, *cache),
        ("vocab", native, "--verifier", verifier, "--sizes", "8,16", *cache),
    ):
        assert here(*arguments) == 0, arguments[0]
        assert capsys.readouterr().out


def test_convert_wants_the_size_of_the_vocabulary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save(tmp_path / "source", capture(2))
    assert here("convert", source, tmp_path / "native", "--cache", tmp_path / "cache") == 2
    assert "--verifier DIR or --vocab-size N" in capsys.readouterr().err
    assert not (tmp_path / "native").exists()


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path, verifier: Path) -> None:
    directory = save(tmp_path / "sound", capture(), CONFIG)
    command = (
        f"{sys.executable} -m eagle3.shards inspect {directory} --verifier {verifier} "
        f"--cache {tmp_path / 'cache'} --max-seq-len 128 | true; exit ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_one_message(
    tmp_path: Path, verifier: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = save(tmp_path / "sound", capture(2), CONFIG)
    command = ("inspect", directory, "--verifier", verifier, "--device", "cuda")
    assert here(*command, "--cache", tmp_path / "cache") == 2
    assert capsys.readouterr().err.startswith("error: --device: found cuda, but torch can use no")


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["directory", "pipe"])
def test_what_is_no_file_is_named_among_the_others(
    tmp_path: Path,
    make: Callable[[Path], None],
    command: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory = save(tmp_path / "sound", capture(), CONFIG)
    make(directory / "data_77.pt")
    assert here(command, directory, "--cache", tmp_path / "cache") == 1
    assert "data_77.pt: cannot be read (a " in capsys.readouterr().out


def test_messages_name_options_and_not_the_keys_of_a_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, cache = save(tmp_path / "source", capture(2)), ("--cache", tmp_path / "cache")
    assert here("convert", source, tmp_path / "out", "--vocab-size", VOCAB, *cache) == 2
    errors = capsys.readouterr().err
    assert "nor the command line says what the stored states are" in errors
    assert "--layer-id-convention=entering (or after)" in errors
    assert "--aux-layer-ids=2,30,58 (the layers" in errors
    assert here("verify", source, "--vocab-size", 3, *cache) == 1
    assert "Set --vocab-size to the verifier's" in capsys.readouterr().out
    (tmp_path / "map.pt").write_bytes(b"nothing")
    words = ("--vocab-size", VOCAB, "--compare", tmp_path / "map.safetensors")
    assert here("vocab", source, *words, *cache) == 2
    assert "Set --compare to a .safetensors or .pt file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Set paths.shards=/a/b.c.", "Set DIR=/a/b.c."),
        ("set paths.arrow to it", "set --arrow to it"),
        ("data.aux_layer_ids=[2,30] (x)", "--aux-layer-ids=2,30 (x)"),
        ("(model.vocab_size=7). Set model.hidden_size", "(--vocab-size=7). Set --hidden-size"),
        ("the config and the config.json", "the command line and the config.json"),
        ("mydata.last_hidden, paths.shards_x", "mydata.last_hidden, paths.shards_x"),
    ],
)
def test_keys_become_options(message: str, expected: str) -> None:
    assert as_options(message) == expected
