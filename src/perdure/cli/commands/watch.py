"""`perdure watch`: follow a run live; any number of terminals may do so."""

import asyncio

import click

from perdure.cli.commands import completion
from perdure.cli.commands.run_options import NOTIFY
from perdure.cli.console import answer, json_option, say
from perdure.settings.load import load_settings


@click.command()
@click.argument("run_id", metavar="RUN", shell_complete=completion.runs)
@NOTIFY
@json_option
def watch(run_id: str, notify: str, as_json: bool) -> None:
    """Follow a run to its end; Ctrl-C does not stop the run."""
    settings = load_settings()
    from perdure.cli.connection import connect
    from perdure.cli.runs import launch, results

    async def work() -> None:
        connection = await connect(settings)
        handle = await connection.perdure.run(run_id)
        episodes, stopped = await launch.to_the_end(settings, handle, notify=notify)
        if as_json:
            answer(results.document(run_id, episodes, stopped))
        else:
            launch.show_results(settings, connection, run_id, episodes)
            if stopped:
                say(stopped)

    asyncio.run(work())
