"""Renders the batch script of a job array whose tasks are workers, one per node.

The array's task limit (`%N`) is the number of nodes. Slurm keeps it, so neither a restarted controller
nor a lost node needs a process of ours.
"""

import shlex
import sys
from pathlib import Path

from pydantic import Field

from perdure.installation import PACKAGE, service_folder
from perdure.types import Frozen

PROGRAM = "perdure.stack.slurm_workers.node_program"
NOT_SHARED = 101
"""Exit code of a task whose node cannot see the shared folder or Perdure's Python."""


class SlurmPlan(Frozen):
    name: str
    """The job's name; `list` and `down` find the job by it."""
    folder: Path
    """Logs and reports of the tasks. Every node must see it."""
    home: str
    """The home on each node; `{node}` becomes the node's name, `{user}` the user's."""
    partition: str = ""
    """Empty: Slurm's default."""
    least: int = Field(1, ge=1)
    most: int = Field(1, ge=1)
    """Fewest and most nodes."""
    time_limit: str = ""
    """In Slurm's syntax. Empty: the partition's."""
    notice_s: int = Field(120, ge=1)
    """Seconds before the time limit at which a worker leaves its node."""
    cpus_per_rollout: float = Field(1.0, gt=0)
    idle_s: float = Field(300.0, ge=0)
    """Seconds without a rollout after which a node beyond `least` is given back."""
    sbatch_args: str = ""
    """Extra options for sbatch, which override all others."""


def render(plan: SlurmPlan) -> str:
    """The script. It holds no secret, because sbatch takes the settings from its environment."""
    # Slurm holds a requeued task back for two minutes. A spare task takes its place at once.
    tasks = 2 * plan.most
    options = [
        f"--job-name={plan.name}",
        f"--array=0-{tasks - 1}%{plan.least}",
        "--nodes=1 --ntasks=1 --exclusive --mem=0",
        "--requeue",
        f"--signal=B:USR1@{plan.notice_s}",
        "--output=/dev/null",
        *([f"--partition={plan.partition}"] if plan.partition else []),
        *([f"--time={plan.time_limit}"] if plan.time_limit else []),
        *([plan.sbatch_args] if plan.sbatch_args else []),
    ]
    python, folder = shlex.quote(sys.executable), shlex.quote(str(plan.folder))
    path = shlex.quote(f"{service_folder()}:{PACKAGE.parent}")
    words = ["-m", PROGRAM, "--home", plan.home, "--cpus-per-rollout", f"{plan.cpus_per_rollout:g}"]
    words += ["--min", str(plan.least), "--max", str(plan.most), "--idle-s", f"{plan.idle_s:g}"]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in options),
        "",
        "umask 077",
        "# Exit codes reach the login node; an output file on the node's own disk would not.",
        f"cd {folder} && [ -x {python} ] || exit {NOT_SHARED}",
        'exec >>"worker-$SLURM_ARRAY_TASK_ID.log" 2>&1',
        f"export PYTHONPATH={path}",
        f"exec {python} {shlex.join(words)}",
    ]
    return "\n".join(lines) + "\n"
