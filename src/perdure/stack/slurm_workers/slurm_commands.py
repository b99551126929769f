"""Runs Slurm's commands: submits a job array, lists, throttles, requeues and cancels its tasks."""

import signal
import subprocess
from collections.abc import Mapping

from perdure.errors import ConfigurationError, MissingDependency, RetryHere
from perdure.types import Frozen

LIMIT_S = 60.0
"""Seconds for one command. Slurm's own timeout for its controller is shorter."""
AWAY = "Unable to contact slurm controller"
FIELDS = "ArrayJobID:|,JobID:|,ArrayTaskID:|,State:|,Reason:|,exit_code:|,NodeList:|"
ACTIVE = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "REQUEUED")


class Task(Frozen):
    """One task of a job array, as squeue shows it."""

    array: int
    job: int
    """The id of this task's job. A requeue does not change it."""
    task: int
    state: str
    reason: str
    """Why it is pending, or how it ended."""
    exit_code: int
    node: str
    """Empty while it is pending."""


def submit(script: str, environment: Mapping[str, str]) -> int:
    """Submit an array whose tasks get this environment; return its job id."""
    try:
        told = _run("sbatch", "--parsable", "--export=ALL", stdin=script, environment=environment)
    except ConfigurationError as error:
        if "invalid partition" not in str(error).lower():
            raise
        found = ", ".join(sorted(set(_run("sinfo", "--noheader", "--format=%R").split())))
        raise ConfigurationError(f"{error}: choose one of {found} with --partition") from None
    return int(told.partition(";")[0])


def tasks(name: str) -> list[Task]:
    """The user's tasks with this job name. Slurm also lists those that ended some minutes ago."""
    options = ("--noheader", "--array", "--me", f"--name={name}", "--states=all")
    lines = _run("squeue", *options, f"--Format={FIELDS}").splitlines()
    return [_task(line) for line in lines if line.strip()]


def running(array: int) -> list[int]:
    """The array's tasks that have a node, in order."""
    options = ("--noheader", "--array", f"--jobs={array}", "--states=RUNNING", "--format=%K")
    return sorted(int(word) for word in _run("squeue", *options).split())


def throttle(array: int, nodes: int) -> None:
    """Let Slurm run this many tasks of the array at a time. Running tasks are not ended."""
    _run("scontrol", "update", f"JobId={array}", f"ArrayTaskThrottle={nodes}")


def requeue(job: str) -> None:
    _run("scontrol", "requeue", job)


def cancel(arrays: set[int]) -> None:
    """Tasks get SIGTERM, and SIGKILL after Slurm's KillWait (30 s)."""
    _run("scancel", *map(str, sorted(arrays)))


def _task(line: str) -> Task:
    array, job, task, state, reason, status, node, _ = (word.strip() for word in line.split("|"))
    return Task(
        array=int(array),
        job=int(job),
        task=int(task),
        state=state,
        reason=reason,
        exit_code=int(status) >> 8,
        node=node,
    )


def _run(*argv: str, stdin: str | None = None, environment: Mapping[str, str] | None = None) -> str:
    """Raises: MissingDependency; RetryHere while the controller is away; ConfigurationError."""
    try:
        done = subprocess.run(
            argv,
            check=False,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=environment,
        )
    except FileNotFoundError:
        raise MissingDependency(
            f"{argv[0]} is not on PATH: run this command on a login node of the Slurm cluster "
            "(Debian: apt-get install slurm-client)"
        ) from None
    except subprocess.TimeoutExpired:
        raise _away(argv[0]) from None
    if done.returncode == 0:
        return done.stdout
    if AWAY in done.stderr or done.returncode == -signal.SIGPIPE:  # it hung up during the call
        raise _away(argv[0])
    said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    raise ConfigurationError(f"{argv[0]} failed: {said[-1]}")


def _away(program: str) -> RetryHere:
    return RetryHere(
        f"{program}: Slurm's controller does not answer; running workers continue. Repeat the command"
    )
