"""`perdure agents`: check that an agent's program works with Perdure, and move it to another version."""

import asyncio
import contextlib
import logging
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perdure.cli import signal_cleanup
from perdure.cli.commands import completion
from perdure.cli.console import answer, json_option, print_when_silent, say
from perdure.settings.settings_loader import load_settings

if TYPE_CHECKING:
    from perdure.settings.settings_tree import Settings
    from perdure.testing.agent_check import AgentCheck


@click.group()
def agents() -> None:
    """Check that an agent's real program works, without a model; change its version."""


assignments_option = click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set an option of the agents, e.g. agent_options.server=codex.",
)


@agents.command()
@click.argument(
    "names", metavar="NAME...", nargs=-1, required=True, shell_complete=completion.agents
)
@assignments_option
@json_option
def check(*, names: tuple[str, ...], assignments: tuple[str, ...], as_json: bool) -> None:
    """Install agents and run each on a small task in a sandbox.

    Needs bubblewrap but no stack: a scripted policy answers in the agent's own tools. NAME may be
    package.module:Name. Prints a table. Exit code 1: an agent did not solve the task.
    """
    import structlog

    settings = load_settings()
    only_warnings = structlog.make_filtering_bound_logger(logging.WARNING)
    structlog.configure(wrapper_class=only_warnings)
    with contextlib.redirect_stdout(sys.stderr):  # the gateway's log
        found = [signal_cleanup.run(_check(settings, name, assignments)) for name in names]
    if as_json:
        from dataclasses import asdict

        answer([asdict(one) for one in found])
    else:
        from perdure.testing.agent_check import table

        click.echo(table(found))
    failed = [one for one in found if one.problem]
    for one in failed:
        say(f"{one.agent}: {one.problem}")
    if failed:
        raise click.exceptions.Exit(1)


async def _check(settings: "Settings", name: str, assignments: tuple[str, ...]) -> "AgentCheck":
    """Raises: ConfigurationError, AgentError, MissingDependency."""
    from perdure import variant_registry
    from perdure.agents.agent_validation import check_options
    from perdure.cli.runs.run_request import fields_of
    from perdure.errors import ConfigurationError
    from perdure.stack.home_providers import ready_provider
    from perdure.testing import agent_check
    from perdure.testing.agent_stand import Stand

    fields: dict[str, Any] = fields_of(assignments, {})
    options = fields.pop("agent_options", {})
    if fields:
        raise ConfigurationError(f"--set {min(fields)}: only agent_options can be set here")
    check_options(name, options)
    agent = variant_registry.load("agent", variant_registry.AGENTS, name)()
    if not agent.needs_model:
        raise ConfigurationError(f"{name} calls no model: there is nothing to check")
    ready_provider(settings, "bubblewrap")
    with tempfile.TemporaryDirectory(prefix="perdure-") as folder, print_when_silent(name):
        stand = Stand(Path(folder), settings.home.absolute() / "tools", settings.agents)
        return await agent_check.check(stand, agent, options)


@agents.command()
@click.argument("name", metavar="NAME", shell_complete=completion.agents)
@click.argument("version", metavar="VERSION")
@assignments_option
def pin(*, name: str, version: str, assignments: tuple[str, ...]) -> None:
    """Move an agent to another version if its checks pass with it.

    Locks the version in a copy of this installation, runs `agents check` there, and prints its table.
    Then writes the lock. Exit code 1: the agent did not solve the task, and the lock is unchanged.
    """
    from perdure.agents.lock_update import update_lock
    from perdure.agents.locked_version import locked_version
    from perdure.agents.npm_packages import LOCKS, variable
    from perdure.durable_files import write_file
    from perdure.errors import ConfigurationError
    from perdure.installation import PACKAGE

    if getattr(load_settings().agents, f"{name}_tarball", None):
        raise ConfigurationError(f"{variable(name)} replaces the registry's {version}: unset it")
    before = locked_version(name)
    with tempfile.TemporaryDirectory(prefix="perdure-") as folder:
        copy = Path(folder) / PACKAGE.name
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        locks = copy / LOCKS.relative_to(PACKAGE)
        with print_when_silent(f"locking {name} {version}"):
            files = update_lock(locks, name, version)
        click.echo(signal_cleanup.run(_check_in_copy(copy.parent, name, assignments)))
        for file in files:
            write_file(LOCKS / file.name, file.read_text())
    say(f"{name} {before} -> {version}: {', '.join(one.name for one in files)}")


async def _check_in_copy(path: Path, name: str, assignments: tuple[str, ...]) -> str:
    """The table of `agents check` with the copy of this package in `path`. Raises: Exit."""
    from perdure.settings import process_environment

    options = [word for one in assignments for word in ("--set", one)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "perdure.cli.main", "agents", "check", name, *options),
        env={**process_environment.variables(), "PYTHONPATH": str(path)},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        printed, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    if process.returncode:
        raise click.exceptions.Exit(process.returncode)
    return printed.decode().rstrip()
