"""A capture that is killed at drawn moments and started again: ``python -m tests.capturing.kills``.

Each round captures the same documents anew, with kill -9 after a drawn number of written documents,
sometimes twice, and once with the directory moved between the runs; the bytes must be those of the
capture that was left alone. ``make soak`` runs twenty.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.capturing.worlds import TALK, content, make_chat_verifier, token_lines, write_lines
from tests.tiny_run import clean_environment

ROOT = Path(__file__).parents[2]


def command(verifier: Path, out: Path, *more: str) -> list[str]:
    """A capture in shards of a few documents."""
    return [
        sys.executable, "-m", "eagle3.capture", f"verifier={verifier}", f"out={out}",
        "aux_layer_ids=[1,2,3]", "batch_tokens=64", "shard_gb=1e-4", "device=cpu",
        "answers.max_new_tokens=6", "answers.batch_tokens=128", *more,
    ]  # fmt: skip


def finish(verifier: Path, out: Path, *more: str) -> str:
    """Run to the end; what was said."""
    done = subprocess.run(
        command(verifier, out, *more),
        capture_output=True, text=True, check=False, cwd=ROOT, env=clean_environment(), timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def kill_when(verifier: Path, out: Path, reached: Callable[[], bool], *more: str) -> bool:
    """Start, and kill -9 once ``reached``; False: it had ended before."""
    with subprocess.Popen(
        command(verifier, out, *more),
        cwd=ROOT, env=clean_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        while process.poll() is None and not reached():
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
        return process.returncode == -signal.SIGKILL


def lines_of(path: Path) -> int:
    """Of a journal or of the answers; 0 before it is there."""
    try:
        return path.read_bytes().count(b"\n")
    except OSError:
        return 0


def _longer(path: Path, limit: int) -> bool:
    return lines_of(path) > limit


def soak(rounds: int, seed: int) -> int:
    """Rounds with a kill; returns how many were killed in the middle."""
    draw, killed = random.Random(seed), 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        verifier = make_chat_verifier(root / "verifier")
        tokens = write_lines(root / "tokens.jsonl", token_lines(120))
        prompts = write_lines(root / "talk.jsonl", TALK * 8)
        given = {"tokens": f"tokens={tokens}", "prompts": f"prompts={prompts}"}
        straight = {}
        for name, line in given.items():
            finish(verifier, root / name, line)
            straight[name] = content(root / name)
        for number in range(rounds):
            name = draw.choice(list(given))
            out = root / f"round{number}"
            file = "answers.jsonl" if name == "prompts" and draw.random() < 0.5 else "journal"
            limit = draw.randrange(1, 30)
            journal = out / ".writing" / file
            hit = kill_when(verifier, out, partial(_longer, journal, limit), given[name])
            killed += hit
            if draw.random() < 0.5:
                out = out.rename(root / f"moved{number}")
            finish(verifier, out, given[name])
            assert content(out) == straight[name], (number, name, limit)
            print(f"{number + 1} of {rounds}: {name}, {file} > {limit}, equal", flush=True)
    return killed


if __name__ == "__main__":
    ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    KILLED = soak(ROUNDS, seed=0)
    print(f"{ROUNDS} captures, {KILLED} killed in the middle, all bytes equal")
    assert KILLED > ROUNDS // 2, "most of them have to be killed in the middle"
