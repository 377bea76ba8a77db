"""The real command on a tiny run: figures are those of training, and errors are one message."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.servers import FakeServer, serve
from tests.tiny_run import TinyWorld, clean_environment, curve, make_world, some_documents


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    """A tiny run that has ended."""
    world = make_world(tmp_path_factory.mktemp("world"), some_documents(24))
    world.run("epochs=2", "max_seq_len=32", "data.val_ratio=0.3")
    return world


def evaluate(folder: Path, *overrides: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "eagle3.evaluate", *overrides],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=clean_environment() | {"WANDB_MODE": "offline"},
        timeout=300,
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def read(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "evaluation.json").read_text())
    return content


def test_a_checkpoint_has_the_figures_of_its_run(world: TinyWorld, tmp_path: Path) -> None:
    (run,) = world.run_folders()
    newest = max((run / "checkpoints").glob("step*.ckpt"))
    done = evaluate(tmp_path, f"ckpt={newest}", f"out={tmp_path / 'out'}")
    found = read(tmp_path / "out")
    for name, value in found["figures"].items():
        if name.startswith("val/"):
            assert value == pytest.approx(curve(run, name)[-1], rel=1e-5), name
    assert "val/acceptance_replay" in done.stdout
    assert found["references"], "cheap drafters on the same rows"
    assert len(found["by_position"]["held-out rounds"]) == 3
    assert (tmp_path / "out" / "evaluation.png").stat().st_size > 10_000
    assert "val/acceptance_replay" in (tmp_path / "out" / "evaluation.md").read_text()


def test_what_the_command_line_says_replaces_the_setting_of_the_run(
    world: TinyWorld, tmp_path: Path
) -> None:
    (run,) = world.run_folders()
    best = run / "checkpoints" / "best.ckpt"
    evaluate(tmp_path, f"ckpt={best}", f"out={tmp_path}", "val.draft_steps=2")
    assert len(read(tmp_path)["by_position"]["held-out rounds"]) == 2


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        pytest.param([], ["ckpt=None and head=None"], id="nothing to judge"),
        pytest.param(["ckpt=a", "head=b"], ["expected one of them"], id="two things"),
        pytest.param(["ckpt=none.ckpt"], ["no such file"], id="missing"),
        pytest.param(["chkpt=a"], ["'chkpt'", "'ckpt'", "eagle3.evaluate"], id="a typo"),
        pytest.param(["server=http://127.0.0.1:9"], ["needs prompts=FILE"], id="no prompts"),
    ],
)
def test_a_mistake_is_one_message(tmp_path: Path, overrides: list[str], said: list[str]) -> None:
    done = evaluate(tmp_path, *overrides, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("error:") == 1
    assert "Traceback" not in done.stderr
    for part in said:
        assert part in done.stderr


def test_a_server_is_judged_and_the_run_gets_its_figures(world: TinyWorld, tmp_path: Path) -> None:
    (run,) = world.run_folders()
    prompts = tmp_path / "judge.jsonl"
    prompts.write_text('{"prompt": "Hi"}\n{"messages": [{"role": "user", "content": "Bye"}]}\n')
    server = FakeServer("sglang")
    with serve(server) as url:
        done = evaluate(
            tmp_path,
            f"ckpt={run / 'checkpoints' / 'best.ckpt'}",
            f"server={url}",
            f"prompts={prompts}",
            "baseline_tok_s=90",
            f"out={tmp_path}",
        )
    found = read(tmp_path)["figures"]
    assert found["serve/acceptance_length"] == pytest.approx(11 / 4)
    assert found["serve/speedup"] == pytest.approx(found["serve/tokens_per_s"] / 90)
    assert [sent["messages"][0]["content"] for sent in server.sent].count("Bye") == 1
    summary = json.loads((run / "summary.json").read_text())
    assert summary["serve/acceptance_length"] == pytest.approx(11 / 4)
    assert "added to" in done.stdout


def test_a_server_that_drafts_in_vain_gets_a_diagnosis(tmp_path: Path) -> None:
    prompts = tmp_path / "judge.txt"
    prompts.write_text("Hi\n")
    server = FakeServer("vllm")
    server.metrics = ["metrics_before", "metrics_before"]
    with serve(server) as url:
        done = evaluate(tmp_path, f"server={url}", f"prompts={prompts}", f"out={tmp_path}")
    assert "reports no drafting" in done.stdout
