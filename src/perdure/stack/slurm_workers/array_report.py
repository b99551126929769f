"""Reports on a job array: what each node reports, and Slurm's reason for each missing node."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from perdure.stack.node_worker import NodeReport, WorkersReport
from perdure.stack.slurm_workers.batch_script import NOT_SHARED
from perdure.stack.slurm_workers.slurm_commands import ACTIVE, Task

SPARE = "JobArrayTaskLimit"
"""Slurm's reason for tasks beyond the array's current number of nodes."""
OURS = ("CANCELLED", "COMPLETED")
"""States of tasks that were ended on purpose."""


def report(tasks: Sequence[Task], folder: Path) -> WorkersReport:
    """`tasks`: all tasks of one array."""
    nodes, absent = [], []
    for task in (one for one in tasks if one.state == "RUNNING"):
        found = _own_report(task, folder)
        if found is None:
            absent.append(f"{task.node}: its worker is starting; see {_log(task, folder)}")
        else:
            nodes.append(found)
    absent += failures(tasks, folder)
    waits = Counter(one.reason for one in tasks if one.state == "PENDING" and one.reason != SPARE)
    absent += [f"{count} pending in Slurm: {reason}" for reason, count in waits.items()]
    return WorkersReport(nodes=tuple(nodes), absent=tuple(absent))


def failures(tasks: Sequence[Task], folder: Path) -> list[str]:
    """The reason for each unexpected end of a task, with the fix."""
    ended = [one for one in tasks if one.state not in (*ACTIVE, *OURS)]
    return [f"{one.node}: {_reason(one, folder)}" for one in ended]


def _reason(task: Task, folder: Path) -> str:
    if task.exit_code == NOT_SHARED:
        return (
            f"the node does not see {folder} or this copy's Python: set PERDURE_HOME to a folder that "
            "all nodes share, and install Perdure on such a file system"
        )
    return f"task {task.task} ended: {task.state} ({task.reason}); see {_log(task, folder)}"


def _own_report(task: Task, folder: Path) -> NodeReport | None:
    try:
        found = NodeReport.model_validate_json((folder / f"node-{task.job}.json").read_bytes())
    except FileNotFoundError:
        return None
    return found if found.node == task.node else None  # otherwise it is the report of a lost node


def _log(task: Task, folder: Path) -> Path:
    return folder / f"worker-{task.task}.log"
