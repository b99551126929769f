"""`perdure workers up | list | down --slurm`: one supervised worker per node of a Slurm partition."""

import time
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.console import many, say
from perdure.errors import ConfigurationError, RetryHere
from perdure.settings.settings_tree import Settings

if TYPE_CHECKING:
    from perdure.stack.node_worker import WorkersReport
    from perdure.stack.slurm_workers.slurm_commands import Task

HOME = "/tmp/perdure-{user}-{node}"
LOOK_S = 2.0
END_S = 120.0
"""Seconds to wait until cancelled tasks have ended: Slurm's KillWait (30 s by default), with a
reserve for a busy controller."""


def up(
    settings: Settings, environment: dict[str, str], ready_s: float, dry_run: bool, **fields: Any
) -> "WorkersReport | None":
    """Submit the array, then cancel the arrays of earlier `up` commands. Return None after a dry
    run.

    `environment`: each worker's variables. Raises: ConfigurationError; MissingDependency;
    RetryHere.
    """
    from perdure.client.temporal_server import configured_address
    from perdure.settings import process_environment
    from perdure.stack.slurm_workers import array_report, slurm_commands
    from perdure.stack.slurm_workers.batch_script import SlurmPlan, render

    plan = SlurmPlan(name=_name(settings), folder=_folder(settings), **fields)
    script = render(plan)
    if dry_run:
        click.echo(script, nl=False)
        return None
    if configured_address(settings) is None:
        raise ConfigurationError(
            "Slurm's nodes need a Temporal server that they can reach: set TEMPORAL_ADDRESS. The "
            "server of `perdure up` answers on this machine only"
        )
    earlier = {one.array for one in _active(slurm_commands.tasks(plan.name))}
    plan.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    everything = {**process_environment.variables(), **environment}
    array = slurm_commands.submit(script, everything)
    say(f"submitted job {array}")
    if earlier:
        slurm_commands.cancel(earlier)
    end = time.monotonic() + ready_s
    told: tuple[str, ...] = ()
    while True:
        tasks = [one for one in slurm_commands.tasks(plan.name) if one.array == array]
        if failed := array_report.failures(tasks, plan.folder):
            slurm_commands.cancel({array})
            raise ConfigurationError("; ".join(failed))
        found = array_report.report(tasks, plan.folder)
        if len(found.nodes) >= plan.least or time.monotonic() > end:
            return found
        if found.absent != told:
            for line in found.absent:
                say(f"waiting: {line}")
            told = found.absent
        time.sleep(LOOK_S)


def report(settings: Settings) -> "WorkersReport | None":
    """Report on the newest array; None if it has neither active nor failed tasks."""
    from perdure.stack.slurm_workers import array_report, slurm_commands

    tasks = slurm_commands.tasks(_name(settings))
    newest = max((one.array for one in tasks), default=0)
    ours = [one for one in tasks if one.array == newest]
    found = array_report.report(ours, _folder(settings))
    return found if _active(ours) or found.absent else None


def down(settings: Settings) -> int:
    """Cancel all tasks, wait until they have ended, and return their number.

    Raises: RetryHere if some have not ended in time.
    """
    from perdure.stack.slurm_workers import slurm_commands

    name = _name(settings)
    found = left = _active(slurm_commands.tasks(name))
    end = time.monotonic() + END_S
    while left:
        if uncancelled := {one.array for one in left if one.state in ("PENDING", "RUNNING")}:
            slurm_commands.cancel(uncancelled)
        time.sleep(LOOK_S)
        left = _active(slurm_commands.tasks(name))
        if left and time.monotonic() > end:
            raise RetryHere(f"{many(len(left), 'task')} of {name} did not end: repeat the command")
    return len(found)


def _active(tasks: "list[Task]") -> "list[Task]":
    from perdure.stack.slurm_workers.slurm_commands import ACTIVE

    return [one for one in tasks if one.state in ACTIVE]


def _name(settings: Settings) -> str:
    from perdure.stack.engine_presence import home_roster_key

    return f"perdure-{PurePath(home_roster_key(settings)).stem}"


def _folder(settings: Settings) -> Path:
    return settings.home.absolute() / "slurm"
