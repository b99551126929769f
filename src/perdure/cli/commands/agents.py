"""`perdure agents`: check that an agent's program works with Perdure."""

import contextlib
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
    """Check that an agent works: its real program, a sandbox, and no model."""


@agents.command()
@click.argument(
    "names", metavar="NAME...", nargs=-1, required=True, shell_complete=completion.agents
)
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE",
              help="Set an option of the agents, e.g. agent_options.server=codex.")  # fmt: skip
@json_option
def check(*, names: tuple[str, ...], assignments: tuple[str, ...], as_json: bool) -> None:
    """Install agents and run each on a small task in a bubblewrap sandbox.

    Needs no stack: a scripted policy answers in the agent's own tools. NAME may be
    package.module:Name. Prints a table. Exit code 1: an agent did not solve the task.
    """
    settings = load_settings()
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
