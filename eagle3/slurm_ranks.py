"""Ranks that ``srun`` has started, one task each, on one machine or on several.

Slurm tells every task its place; this gives it under torchrun's names, which all else reads. One
task per rank, and no torchrun in between, so that the signal before the time limit
(``sbatch --signal``) reaches the ranks themselves.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping

from eagle3.errors import ConfigError

_LOWEST_PORT, _PORTS = 20_000, 12_000
"""Below the ports that Linux gives away by itself."""
_HOW = "srun --kill-on-bad-exit=1 python -m eagle3.train trainer=slurm ..."


def join_srun(environment: MutableMapping[str, str], *, in_sweep: bool) -> None:
    """Say in ``environment`` as torchrun does which rank this task of ``srun`` is.

    The ranks meet on the step's first node; ``MASTER_ADDR`` and ``MASTER_PORT`` are kept where
    they are set. Names: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES

    Raises:
        ConfigError: this is no task of ``srun``, its tasks are spread unevenly over the nodes, or
            each of them would run a whole sweep.
    """
    if "RANK" in environment:
        return
    if in_sweep and "SUBMITIT_EXECUTOR" not in environment:
        raise ConfigError(
            "trainer.start=srun in a sweep: every task would run the whole sweep. Start it on the "
            "login node without srun: -m hydra/launcher=submitit_slurm hydra.launcher.nodes=2 ..."
        )
    step = {name: environment.get(f"SLURM_{name}") for name in _STEP}
    missing = [f"SLURM_{name}" for name, value in step.items() if value is None]
    if missing:
        raise ConfigError(
            f"trainer.start=srun, but {', '.join(missing)} is not set, so this is no task of srun: "
            f"start it with {_HOW}, or leave trainer=slurm out"
        )
    given = {name: value for name, value in step.items() if value is not None}
    per_node = _tasks_per_node(given["STEP_TASKS_PER_NODE"])
    port = _LOWEST_PORT + (int(given["JOB_ID"]) * 31 + int(given["STEP_ID"])) % _PORTS
    environment.setdefault("MASTER_ADDR", first_host(given["STEP_NODELIST"]))
    environment.setdefault("MASTER_PORT", str(port))
    place = {
        "RANK": given["PROCID"],
        "LOCAL_RANK": given["LOCALID"],
        "GROUP_RANK": given["NODEID"],
        "WORLD_SIZE": given["STEP_NUM_TASKS"],
        "LOCAL_WORLD_SIZE": str(per_node),
    }
    environment.update(place)


_STEP = (
    "PROCID",
    "LOCALID",
    "NODEID",
    "JOB_ID",
    "STEP_ID",
    "STEP_NODELIST",
    "STEP_NUM_TASKS",
    "STEP_TASKS_PER_NODE",
)


def _tasks_per_node(text: str) -> int:
    """``4(x2)`` is four on each of two nodes.

    Raises:
        ConfigError: not the same number on every node.
    """
    found = re.fullmatch(r"(\d+)(\(x\d+\))?", text)
    if found is None:
        raise ConfigError(
            f"srun spread its tasks unevenly (SLURM_STEP_TASKS_PER_NODE={text}): expected as many "
            "on every node; give sbatch --nodes and --ntasks-per-node instead of --ntasks"
        )
    return int(found[1])


def first_host(nodelist: str) -> str:
    """The first host of Slurm's short form: ``node[003-007,9],x1`` is ``node003``."""
    (first,) = re.findall(r"^(?:[^,\[]|\[[^\]]*\])+", nodelist)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first)
