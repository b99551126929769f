"""Prints a command's answer on stdout and everything else on stderr.

Rich is imported only where a table is printed, because the import takes a tenth of a second.
"""

import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from perdure.settings import process_environment

if TYPE_CHECKING:
    from rich.console import RenderableType

SILENCE_S = 4.0
"""The longest silence of a command inside `print_when_silent`."""
PIPED_COLUMNS = 160
"""Width of a table that is written to a file or a pipe."""

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print exactly one JSON document on stdout."
)


class _LastOutput:
    """When this process last printed a line by `say`."""

    spoke_at = time.monotonic()


_last_output = _LastOutput()


def only_one_of(**given: bool) -> None:
    """Refuse two flags that both write to stdout. Raises: click.UsageError, which names them."""
    flags = [f"--{name}" for name, asked in given.items() if asked]
    if len(flags) > 1:
        raise click.UsageError(f"{' and '.join(flags)} are mutually exclusive: give one of them")


def answer(document: Any, err: bool = False) -> None:
    """Print the command's JSON answer, one document. `err`: on stderr, as stdout has its data."""
    click.echo(json.dumps(document, indent=1, default=str), err=err)


def say(text: str) -> None:
    """Print progress, a hint or a warning on stderr; it is never part of the answer."""
    _last_output.spoke_at = time.monotonic()
    click.echo(text, err=True)


@contextlib.contextmanager
def print_when_silent(what: str) -> Iterator[None]:
    """Print `what` and the elapsed time whenever nothing has been printed for `SILENCE_S`."""
    started, over = time.monotonic(), threading.Event()

    def talk() -> None:
        while not over.wait(max(0.1, _last_output.spoke_at + SILENCE_S - time.monotonic())):
            if time.monotonic() - _last_output.spoke_at >= SILENCE_S:
                say(f"  {what} ({time.monotonic() - started:.0f} s)")

    talker = threading.Thread(target=talk, daemon=True)
    talker.start()
    try:
        yield
    finally:
        over.set()
        talker.join()


def print_table(table: "RenderableType") -> None:
    """Print a table on stdout, as wide as the terminal, or `PIPED_COLUMNS` if there is none."""
    from rich.console import Console

    wide = None if Console().is_terminal else PIPED_COLUMNS
    Console(highlight=False, width=wide).print(table)


def many(count: int, noun: str) -> str:
    """`1 rollout`, `2 rollouts`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def invoked_command() -> str:
    """How the user calls this command: `perdure`, or the path of the script if it is not on PATH.

    `uv run` puts `perdure` on PATH for its own child only.
    """
    script = sys.argv[0]
    found = shutil.which("perdure")
    kept_on_path = not process_environment.foreign("UV_RUN_RECURSION_DEPTH")
    is_it = found is not None and os.path.realpath(found) == os.path.realpath(script)
    if not script.endswith("perdure") or (kept_on_path and is_it):
        return "perdure"
    return os.path.relpath(script)
