"""Everything that only a CUDA device can tell, in one report.

    python benchmarks/gpu_check.py --out gpu_report.txt        (make gpu-check)

Runs the tests marked ``gpu``, the kernels against plain PyTorch, and one training step of the real
size with every technique off, each alone and all on. Exit status 1 where a part failed; the report
holds the output of all parts either way.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch

from eagle3 import __version__

ROOT = Path(__file__).resolve().parents[1]
PARTS = {
    "tests": ["-m", "pytest", "-q", "-m", "gpu", "tests"],
    "kernels": ["benchmarks/kernels.py"],
    "step": ["benchmarks/step.py", "--device", "cuda"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="file for the report")
    out = parser.parse_args().out
    if not torch.cuda.is_available():
        print(
            f"error: torch {torch.__version__} finds no CUDA device. Run this on a machine with "
            "one, with the CUDA build of torch (constraints.txt pins the version)",
            file=sys.stderr,
        )
        return 2
    lines, failed = [head()], []
    for name, command in PARTS.items():
        print(f"{name}: python {' '.join(command)}", flush=True)
        started = time.perf_counter()
        run = subprocess.run(
            [sys.executable, *command], cwd=ROOT, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        seconds = time.perf_counter() - started
        verdict = "ok" if run.returncode == 0 else f"FAILED, exit status {run.returncode}"
        print(f"  {verdict} after {seconds:.0f} s", flush=True)
        failed += [name] if run.returncode else []
        lines += [f"== {name}: {verdict}, {seconds:.0f} s ==", run.stdout.rstrip()]
        out.write_text("\n".join(lines) + "\n")
    print(f"report in {out}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return int(bool(failed))


def head() -> str:
    card = torch.cuda.get_device_properties(0)
    return (
        f"eagle3 {__version__}, torch {torch.__version__}, CUDA {torch.version.cuda}, {card.name}, "
        f"compute capability {card.major}.{card.minor}, {card.total_memory / 2**30:.0f} GiB, "
        f"{torch.cuda.device_count()} visible"
    )


if __name__ == "__main__":
    sys.exit(main())
