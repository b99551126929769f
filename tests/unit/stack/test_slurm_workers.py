"""The batch script of workers on Slurm, and what `perdure workers ... --slurm` says when it cannot help.

Slurm's commands are stand-ins here: shell scripts on PATH. tests/hosts/test_slurm.py runs the real ones.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from perdure.cli.main import invoke
from perdure.stack.node_worker import NodeReport
from perdure.stack.slurm_workers.array_report import report
from perdure.stack.slurm_workers.batch_script import NOT_SHARED, SlurmPlan, render
from perdure.stack.slurm_workers.node_program import wanted_nodes
from perdure.stack.slurm_workers.slurm_commands import Task

StandIn = Callable[[str, str], None]
UP = ["workers", "up", "--slurm"]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Puts a shell script on PATH in place of one of Slurm's commands; PATH has no others."""
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PERDURE_CONFIG", os.devnull)
    monkeypatch.setenv("PERDURE_SECRET", "a secret of sixteen")
    monkeypatch.setenv("TEMPORAL_ADDRESS", "temporal:7233")
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))

    def put(name: str, script: str) -> None:
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)

    return put


def plan(folder: Path) -> SlurmPlan:
    return SlurmPlan(
        name="perdure-x",
        folder=folder,
        home="/scratch/{user}/p q-{node}",
        partition="spot",
        least=2,
        most=5,
        time_limit="04:00:00",
        notice_s=90,
        sbatch_args="--account=a --qos=low",
    )


def task(**fields: object) -> Task:
    values = {
        "array": 7,
        "job": 8,
        "task": 0,
        "state": "RUNNING",
        "reason": "None",
        "exit_code": 0,
        "node": "n1",
    }
    return Task.model_validate(values | fields)


def test_the_script_asks_for_whole_nodes_that_slurm_requeues_and_signals(tmp_path: Path) -> None:
    """The array has a spare task per node, because a requeued one waits for two minutes."""
    lines = render(plan(tmp_path)).splitlines()
    words = " ".join(line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH "))

    assert set(words.split()) == {
        *("--job-name=perdure-x", "--array=0-9%2", "--nodes=1", "--ntasks=1", "--exclusive"),
        *("--mem=0", "--requeue", "--signal=B:USR1@90", "--output=/dev/null", "--partition=spot"),
        *("--time=04:00:00", "--account=a", "--qos=low"),
    }


def test_a_task_starts_the_node_program_in_the_shared_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, folder = tmp_path / "a python", tmp_path / "shared by all"
    python.write_text('#!/bin/bash\nprintf "%s\\n" "$PWD" "$@"\n')
    python.chmod(0o755)
    folder.mkdir()
    monkeypatch.setattr(sys, "executable", str(python))
    environment = {"SLURM_ARRAY_TASK_ID": "3", "PATH": os.environ["PATH"]}
    subprocess.run(["bash", "-c", render(plan(folder))], env=environment, check=True)

    assert (folder / "worker-3.log").read_text().splitlines() == [
        *(str(folder), "-m", "perdure.stack.slurm_workers.node_program"),
        *("--home", "/scratch/{user}/p q-{node}", "--cpus-per-rollout", "1"),
        *("--min", "2", "--max", "5", "--idle-s", "300"),
    ]


def test_a_node_without_the_shared_folder_says_so_by_its_exit_code(tmp_path: Path) -> None:
    done = subprocess.run(["bash", "-c", render(plan(tmp_path / "absent"))], check=False)

    assert done.returncode == NOT_SHARED


def test_a_dry_run_prints_the_script_without_a_secret(
    stand_in: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    """And asks Slurm for nothing: its commands are not even there."""
    assert invoke([*UP, "--dry-run", "--max", "3"]) == 0
    said = capsys.readouterr().out
    assert "--array=0-5%1" in said
    assert "a secret of sixteen" not in said


def test_up_without_slurms_commands_says_where_to_run_it(
    stand_in: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(UP) == 2
    assert "is not on PATH: run this command on a login node" in capsys.readouterr().err


def test_up_without_a_temporal_address_says_what_to_set(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TEMPORAL_ADDRESS")

    assert invoke(UP) == 2
    assert "set TEMPORAL_ADDRESS" in capsys.readouterr().err


def test_an_unknown_partition_is_refused_with_those_that_exist(
    stand_in: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in("squeue", "")
    stand_in("sbatch", "echo 'sbatch: error: Invalid partition name specified' >&2; exit 1")
    stand_in("sinfo", "echo spot; echo long; echo long")

    assert invoke([*UP, "--partition", "gpu"]) == 2
    assert capsys.readouterr().err.endswith("choose one of long, spot with --partition\n")


def test_a_home_that_nodes_do_not_see_is_refused_and_the_job_cancelled(
    stand_in: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = f"7|8|0|FAILED|NonZeroExitCode|{NOT_SHARED << 8}|n1|"
    stand_in("squeue", f"[ -e {tmp_path}/submitted ] && echo '{row}'; true")
    stand_in("sbatch", f"echo 7; : > {tmp_path}/submitted")
    stand_in("scancel", f'echo "$@" > {tmp_path}/cancelled')

    assert invoke(UP) == 2
    told = capsys.readouterr().err
    assert f"n1: the node does not see {tmp_path}/home/slurm" in told
    assert "set PERDURE_HOME to a folder that all nodes share" in told
    assert (tmp_path / "cancelled").read_text() == "7\n"


def test_workers_get_the_settings_and_the_secret_in_their_environment(
    stand_in: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The secret travels in the job's environment and not in the script."""
    ready = NodeReport(node="n1", pid=1, starts=1, seats=4, taken=0, log="/l").model_dump_json()
    stand_in("squeue", f"[ -e {tmp_path}/script ] && echo '7|8|0|RUNNING|None|0|n1|'; true")
    stand_in(
        "sbatch",
        f'while read -r line; do echo "$line"; done > {tmp_path}/script\n'
        f'echo "$* $PERDURE_SECRET $PERDURE_STORE" > {tmp_path}/told\n'
        f"echo '{ready}' > {tmp_path}/home/slurm/node-8.json\necho 7",
    )

    assert invoke([*UP, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nodes"][0]["seats"] == 4
    told = (tmp_path / "told").read_text()
    assert told == f"--parsable --export=ALL a secret of sixteen {tmp_path}/home/store\n"
    assert "a secret of sixteen" not in (tmp_path / "script").read_text()


@pytest.mark.parametrize(
    "squeue",
    [
        "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1",
        "kill -PIPE $$",
    ],
    ids=["never answers", "hangs up during the call"],
)
def test_list_tells_a_silent_controller_from_missing_workers(
    squeue: str, stand_in: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in("squeue", squeue)

    assert invoke(["workers", "list", "--slurm"]) == 1
    assert "running workers continue" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "give either --ray or --slurm"),
        (["--ray", "--slurm"], "give either --ray or --slurm"),
        (["--slurm", "--label", "a=b"], "--label needs --ray"),
        (["--ray", "--min", "2"], "--min needs --slurm"),
        (["--slurm", "--min", "3", "--max", "2"], "--max 2 is less than --min 3"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    stand_in: StandIn, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert invoke(["workers", "up", *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("running", "waiting", "wanted"),
    [(1, 0, 1), (1, 1, 2), (1, 9, 3), (4, 99, 5), (4, 0, 4), (0, 0, 1)],
)
def test_waiting_rollouts_add_nodes_up_to_the_most(running: int, waiting: int, wanted: int) -> None:
    assert wanted_nodes(1, 5, running, waiting, seats=8) == wanted


def test_a_report_that_a_lost_node_left_is_not_that_of_the_next(tmp_path: Path) -> None:
    """Spare tasks are no news; other pending ones are listed with Slurm's reason."""
    lost = NodeReport(node="n0", pid=1, starts=1, seats=4, taken=2, log="/l")
    (tmp_path / "node-8.json").write_text(lost.model_dump_json())
    pending = [
        task(task=k, state="PENDING", reason=reason, node="")
        for k, reason in enumerate(["JobArrayTaskLimit", "Resources", "Resources"], start=1)
    ]
    found = report([task(), *pending], tmp_path)

    assert found.nodes == ()
    assert found.absent == (
        f"n1: its worker is starting; see {tmp_path}/worker-0.log",
        "2 pending in Slurm: Resources",
    )
