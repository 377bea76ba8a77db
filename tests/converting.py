"""A small v1 capture to convert, and conversions as processes that come to grief.

Run as a module it converts ``SOURCE`` once for each trouble, each time in a process of its own:
``python -m tests.converting SOURCE OUT pwrite 7 OUT2 RLIMIT_FSIZE 4096 ...`` kills the first one
with SIGKILL in the middle of its seventh ``os.pwrite`` and lets the second one write no file of
more than 4,096 bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from eagle3.convert import ConvertRequest, ConvertSummary, convert
from eagle3.data.declaration import Declaration
from eagle3.data.layout import StateLayout
from eagle3.names import LastHidden, LayerIdConvention

ROOT = Path(__file__).parents[1]
LAYOUT = StateLayout(num_aux_layers=3, hidden_size=4, vocab_size=50)
DECLARED = Declaration((2, 15, 27), LayerIdConvention.entering, LastHidden.pre_norm)
LENGTHS = (9, 14, 5, 22, 7, 11, 2, 16, 8, 3)
SHARD_BYTES = 1400
"""34 tokens of 41 bytes: four shards."""


def write_capture(directory: Path, lengths: Sequence[int] = LENGTHS) -> Path:
    """``data_{i}.pt`` with random states."""
    directory.mkdir(parents=True)
    for number, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(number)
        states = [torch.randn(length, 4, generator=generator).bfloat16() for _ in range(4)]
        content = {
            "input_ids": torch.randint(0, 50, (length,), generator=generator),
            "loss_mask": (torch.arange(length) >= length // 3).long(),
            "hidden_states": states,
        }
        torch.save(content, directory / f"data_{number}.pt")
    return directory


def request(source: Path, out: Path, **changes: Any) -> ConvertRequest:
    """A conversion with small shards."""
    arguments: dict[str, Any] = {
        "source": source,
        "out": out,
        "layout": LAYOUT,
        "declaration": DECLARED,
        "cache": out.parent / "cache",
        "shard_bytes": SHARD_BYTES,
        "num_workers": 2,
    }
    return ConvertRequest(**(arguments | changes))


def run(source: Path, out: Path, **changes: Any) -> ConvertSummary:
    """Convert in this process."""
    return convert(request(source, out, **changes), lambda line: None)


def run_into(troubles: dict[Path, tuple[str, int]], source: Path) -> dict[Path, tuple[int, str]]:
    """Convert to each of the directories with its trouble: exit status and last words."""
    words = [str(w) for out, (name, number) in troubles.items() for w in (out, name, number)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.converting", str(source), *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    ends = [json.loads(line) for line in done.stdout.splitlines()]
    return {out: (end["status"], end["error"]) for out, end in zip(troubles, ends, strict=True)}


def tree(directory: Path) -> dict[str, tuple[str, int]]:
    """Content and modification time of every file."""
    return {
        str(path.relative_to(directory)): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mtime_ns,
        )
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def contents(directory: Path) -> dict[str, str]:
    """Content of every file."""
    return {name: content for name, (content, _) in tree(directory).items()}


def die_in(name: str, calls: int) -> None:
    """Kill this process, half done, in a call of ``os.<name>``."""
    really: Callable[..., Any] = getattr(os, name)
    left = [calls]

    def dying(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            if name == "pwrite":
                file, content, offset = arguments
                really(file, content[: len(content) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return really(*arguments)

    setattr(os, name, dying)


def convert_in_child(source: Path, out: Path, name: str, number: int) -> dict[str, Any]:
    """Exit status of the child, negative for a signal, and its error."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        if name == "RLIMIT_FSIZE":
            resource.setrlimit(resource.RLIMIT_FSIZE, (number, number))
        else:
            die_in(name, number)
        try:
            run(source, out, num_workers=1)
        except ValueError as error:
            os.write(writer, str(error).encode())
            os._exit(1)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as words:
        error = words.read()
    return {"status": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), "error": error}


def main() -> None:
    """Each trouble in turn; a line of JSON about each."""
    source, *words = sys.argv[1:]
    for out, name, number in zip(words[::3], words[1::3], words[2::3], strict=True):
        print(json.dumps(convert_in_child(Path(source), Path(out), name, int(number))))


if __name__ == "__main__":
    main()
