"""`perdure engines` and its commands."""

import click

from perdure.cli.commands.engines import replicas, roster


@click.group()
def engines() -> None:
    """Start engines on Ray; list, add, drain, remove."""


for command in (
    *(replicas.up, replicas.down),
    *(roster.list_, roster.add, roster.drain, roster.remove),
    replicas.logs,
):
    engines.add_command(command)
