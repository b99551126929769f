"""`perdure watch`: follows a run live, from any number of terminals."""

import asyncio

import click

from perdure.cli.commands import completion
from perdure.cli.commands.run_options import NOTIFY
from perdure.cli.console import json_option
from perdure.settings.settings_loader import load_settings


@click.command()
@click.argument("run_id", metavar="RUN", shell_complete=completion.runs)
@NOTIFY
@json_option
def watch(run_id: str, notify: str, as_json: bool) -> None:
    """Follow a run to its end; Ctrl-C does not stop the run.

    Exit code 1: a rollout failed, or the budget ended the run before all rollouts had a verdict.
    """
    settings = load_settings()
    from perdure.cli.runs.run_launcher import watch_run
    from perdure.cli.temporal_connection import connect

    async def work() -> int:
        connection = await connect(settings)
        handle = await connection.perdure.run(run_id)
        return await watch_run(settings, connection, handle, as_json=as_json, notify=notify)

    if code := asyncio.run(work()):
        raise click.exceptions.Exit(code)
