"""The two streams of a command: its answer on stdout, everything else on stderr."""

import json
import os
import sys
from typing import Any

import click
from rich.console import Console, RenderableType

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print exactly one JSON document on stdout."
)

progress = Console(stderr=True, highlight=False, soft_wrap=True)
"""Progress, hints and warnings. Never part of the answer."""


PIPED_COLUMNS = 160


def only_one_of(**given: bool) -> None:
    """Refuse flags that each want stdout for themselves. Raises: click.UsageError naming them."""
    flags = [f"--{name}" for name, asked in given.items() if asked]
    if len(flags) > 1:
        raise click.UsageError(f"{' and '.join(flags)} exclude each other: give one of them")


def answer(document: Any) -> None:
    """The JSON answer of a command: one document, nothing else."""
    click.echo(json.dumps(document, indent=1, default=str))


def say(text: str) -> None:
    """A line for people, on stderr. Rich markup is read."""
    progress.print(text)


def print_table(table: RenderableType) -> None:
    """A table as the answer, on stdout; as wide as it needs where nobody sees it scroll."""
    wide = None if Console().is_terminal else PIPED_COLUMNS
    Console(highlight=False, width=wide).print(table)


def many(count: int, noun: str) -> str:
    """`1 rollout`, `2 rollouts`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def me() -> str:
    """How to call this command again: `uv run` puts it on PATH for its own child only."""
    if "UV_RUN_RECURSION_DEPTH" not in os.environ:
        return "perdure"
    return os.path.relpath(sys.argv[0]) if sys.argv[0].endswith("perdure") else "perdure"
