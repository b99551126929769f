"""`perdure engines` and its commands."""

import click

from perdure.cli.commands.engines import engine_replicas, engine_roster


@click.group()
def engines() -> None:
    """Start engines on Ray; list, add, drain, remove."""


for command in (
    *(engine_replicas.up, engine_replicas.down),
    *(engine_roster.list_, engine_roster.add, engine_roster.drain, engine_roster.remove),
    engine_replicas.logs,
):
    engines.add_command(command)
