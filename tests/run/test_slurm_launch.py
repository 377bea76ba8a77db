"""Slurm without Slurm: its variables, and stand-ins for ``sbatch``, ``srun`` and ``sacct``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from submitit.slurm.slurm import SlurmJobEnvironment

from eagle3.errors import ConfigError
from eagle3.slurm_ranks import first_host, join_srun
from eagle3.sweep_options import SUBMITIT_SLURM
from tests.run.test_gpu_pool import REPOSITORY, environment, notes
from tests.tiny_run import TinyWorld, clean_environment, make_world, some_documents

TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
}
SBATCH = """#!/bin/bash
cp "$1" {folder}/script
for task in 0 1; do
  SLURM_JOB_ID=$((80 + task)) SLURM_ARRAY_JOB_ID=77 SLURM_ARRAY_TASK_ID=$task SLURM_NTASKS=1 \\
  SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_JOB_NUM_NODES=1 \\
  SLURM_JOB_NODELIST=localhost bash "$1" > {folder}/array_$task 2>&1 < /dev/null &
done
echo Submitted batch job 77
"""
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do [[ $1 == --unbuffered ]] || shift; shift; done
exec "$@"
"""
SACCT = """#!/bin/sh
echo 'JobID|State|NodeList'
echo '77_0|RUNNING|localhost'
echo '77_1|RUNNING|localhost'
"""


def test_a_task_of_srun_is_a_rank_under_torchruns_names() -> None:
    variables = dict(TASK)
    join_srun(variables, in_sweep=False)
    told = {name: value for name, value in variables.items() if not name.startswith("SLURM_")}
    port = int(told.pop("MASTER_PORT"))
    assert 1024 < port < 32768
    assert told == {
        "MASTER_ADDR": "gpu08",
        "RANK": "6",
        "LOCAL_RANK": "2",
        "GROUP_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
    }
    other = TASK | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    join_srun(other, in_sweep=False)
    assert other["MASTER_PORT"] == str(port), "every rank has to find the same"
    given = TASK | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    join_srun(given, in_sweep=False)
    assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("10.0.0.1", "29500")


def test_torchrun_inside_of_srun_has_the_last_word() -> None:
    variables = TASK | {"RANK": "1"}
    join_srun(variables, in_sweep=False)
    assert variables == TASK | {"RANK": "1"}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("node[003-007,9],x1", "node003"),
        ("r[1-2]n[01,04]-ib", "r1n01-ib"),
        ("a-b.c[12]", "a-b.c12"),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("changes", "in_sweep", "said"),
    [
        pytest.param({"SLURM_STEP_ID": None}, False, "SLURM_STEP_ID is not set", id="batch script"),
        pytest.param({"SLURM_STEP_TASKS_PER_NODE": "4,3"}, False, "unevenly", id="uneven"),
        pytest.param({}, True, "submitit_slurm", id="sweep"),
    ],
)
def test_what_is_no_rank_is_refused(
    changes: dict[str, str | None], in_sweep: bool, said: str
) -> None:
    variables = {k: v for k, v in (TASK | changes).items() if v is not None}
    with pytest.raises(ConfigError, match=said):
        join_srun(variables, in_sweep=in_sweep)
    assert "RANK" not in variables


def start_task(world: TinyWorld, rank: int, nodes: int) -> subprocess.Popen[str]:
    """One of two tasks of a step, on one node or, as far as variables go, on two."""
    place = {
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2" if nodes == 1 else "1(x2)",
        "SLURM_NTASKS_PER_NODE": str(2 // nodes),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank if nodes == 1 else 0),
        "SLURM_NODEID": str(0 if nodes == 1 else rank),
        "SLURM_JOB_ID": str(os.getpid()),  # the port follows from it
    }
    return subprocess.Popen(
        world.command(
            *("trainer=slurm", "trainer.accelerator=cpu", "epochs=1", "max_seq_len=64"),
            *("ttt_steps=2", "preflight=off"),
        ),
        cwd=world.root,
        env=clean_environment() | TASK | place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.ddp
@pytest.mark.parametrize("nodes", [1, 2])
def test_two_tasks_of_srun_are_one_run(nodes: int, tmp_path: Path) -> None:
    world = make_world(tmp_path, some_documents(8))
    tasks = [start_task(world, rank, nodes) for rank in range(2)]
    outputs = [task.communicate(timeout=300)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], "\n".join(outputs)
    (run,) = world.run_folders()
    assert json.loads((run / "summary.json").read_text())["exit_reason"] == "finished"
    assert f"run folder: {run}" in outputs[0]
    assert "run folder" not in outputs[1]


@pytest.mark.ddp
def test_trainer_slurm_outside_of_srun_is_one_message(tmp_path: Path) -> None:
    done = make_world(tmp_path, some_documents(2)).run("trainer=slurm", check=False)
    assert done.returncode == 2
    assert "this is no task of srun: start it with srun" in done.stderr
    assert "Traceback" not in done.stderr


def test_only_one_of_the_two_answers_the_signal_before_the_limit() -> None:
    """submitit would end the job at its own signal, unsaved, where ours saves and asks anew."""
    ours = SUBMITIT_SLURM["additional_parameters"]["signal"].split("@")[0]
    assert ours == "USR1"
    assert ours != SlurmJobEnvironment.USR_SIG


@pytest.mark.ddp
def test_a_sweep_is_one_array_and_its_results_come_back(tmp_path: Path) -> None:
    """The script that submitit writes is run by the stand-ins, job by job."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("sacct", SACCT)):
        (programs / name).write_text(text.replace("{folder}", str(tmp_path)))
        (programs / name).chmod(0o755)
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "tests.run.pool_command",
                "-m",
                "hydra/launcher=submitit_slurm",
            ),
            *("hydra.launcher.partition=gpu", "trainer.devices=4", "seed=1,2"),
            *(f"paths.output={tmp_path}", "name=plain_fails"),
        ],
        cwd=REPOSITORY,
        env=environment() | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 7, done.stdout + done.stderr
    assert set(notes(tmp_path, "ended")) == {0}
    assert set(notes(tmp_path, "started")) == {0, 1}
    (sweep,) = tmp_path.glob("sweep_*")
    assert f"swept {sweep}" in done.stdout
    script = (tmp_path / "script").read_text()
    for line in (
        *("array=0-1%2", "gpus-per-node=4", "ntasks-per-node=1", "nodes=1", "partition=gpu"),
        *("signal=USR1@300", "requeue", "time=1440", "open-mode=append"),
    ):
        assert f"#SBATCH --{line}\n" in script
