"""``python -m eagle3.shards`` as a process: exit codes, files, what goes to which stream."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3.shards import main
from tests.inspection.planted import CONFIG, capture, make_verifier, save


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
        (["inspect", "."], "error: .: no file says num_aux_layers"),
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
