"""The two streams of a command: its answer on stdout, everything else on stderr."""

import json
from typing import Any

import click
from rich.console import Console

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print exactly one JSON document on stdout."
)

progress = Console(stderr=True, highlight=False, soft_wrap=True)
"""Progress, hints and warnings. Never part of the answer."""


def answer(document: Any) -> None:
    """The JSON answer of a command: one document, nothing else."""
    click.echo(json.dumps(document, indent=1, default=str))


def say(text: str) -> None:
    """A line for people, on stderr. Rich markup is read."""
    progress.print(text)
