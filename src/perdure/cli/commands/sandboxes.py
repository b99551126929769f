"""`perdure sandboxes`: prove a sandbox provider on the user's own account."""

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from perdure.cli import signal_cleanup
from perdure.cli.commands import completion
from perdure.cli.console import answer, json_option, print_when_silent, say
from perdure.settings.settings_loader import load_settings

if TYPE_CHECKING:
    from perdure.settings.settings_tree import Settings
    from perdure.testing.sandbox_check import Bounds, SandboxCheck

MOST_BURST = 1000


@click.group()
def sandboxes() -> None:
    """Prove a sandbox provider on your own account: its promises, and a burst."""


@sandboxes.command()
@click.option("--provider", required=True, metavar="NAME", shell_complete=completion.sandboxes,
              help="Provider of the registry, or package.module:Name.")  # fmt: skip
@click.option("--burst", type=click.IntRange(1, MOST_BURST), default=10, metavar="N",
              show_default=True, help="Sandboxes to create at once.")  # fmt: skip
@click.option("--minutes", type=click.FloatRange(0, min_open=True), default=30.0, metavar="N",
              show_default=True, help="Stop after N minutes.")  # fmt: skip
@click.option("--price", type=click.FloatRange(0), metavar="DOLLARS",
              help="Price of one sandbox for one hour, to estimate the cost.")  # fmt: skip
@click.option("--max-cost", type=click.FloatRange(0), metavar="DOLLARS",
              help="Refuse to start if the check could cost more. Needs --price.")  # fmt: skip
@click.option("--report", "folder", type=click.Path(file_okay=False, path_type=Path),
              metavar="FOLDER", help="Where to write sandbox-check.json and sandbox-check.md."
              " [default: ./sandbox-check-NAME]")  # fmt: skip
@json_option
def check(
    *,
    provider: str,
    burst: int,
    minutes: float,
    price: float | None,
    max_cost: float | None,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Run the published contract, then a burst, in real sandboxes.

    Needs no stack. Writes a report without keys, hosts or paths, and prints it. Ctrl-C removes every
    sandbox. After kill -9, each ends at its time limit, and the next check removes them. Exit code 1: a
    promise is broken, a sandbox did not boot or could not be killed, or the time ran out.
    """
    from perdure.episodes.output_file import output_file
    from perdure.testing.sandbox_check import Bounds
    from perdure.testing.sandbox_check_page import page, public

    bounds = Bounds(burst, minutes * 60, price, max_cost)
    settings = load_settings()
    with contextlib.redirect_stdout(sys.stderr):  # logs
        found = public(signal_cleanup.run(_check(settings, provider, bounds)))
    folder = folder or Path(f"sandbox-check-{found.provider}")
    document, text = found.model_dump(mode="json"), page(found)
    for name, written in (
        ("sandbox-check.json", found.model_dump_json(indent=1) + "\n"),
        ("sandbox-check.md", text),
    ):
        with output_file(folder / name) as file:
            file.write(written.encode())
    if as_json:
        answer(document)
    else:
        click.echo(text)
    say(f"written to {folder}")
    if not found.passed:
        raise click.exceptions.Exit(1)


async def _check(settings: "Settings", name: str, bounds: "Bounds") -> "SandboxCheck":
    """Raises: ConfigurationError, MissingDependency, AccountExhausted."""
    from perdure.sandboxes.file_locks import locked
    from perdure.stack.home_providers import ready_provider
    from perdure.testing import sandbox_check
    from perdure.types import AccountCaps

    bounds.check()
    found = ready_provider(_own_home(settings), name)
    caps = settings.sandbox.caps.get(name) or found.account_caps or AccountCaps()
    lock = settings.home.absolute() / "checks" / f"{found.name}.lock"
    with print_when_silent(f"checking sandboxes of {found.name}"):
        async with locked(lock):
            return await sandbox_check.check(found, bounds, caps, say)


def _own_home(settings: "Settings") -> "Settings":
    """The same settings with a home of its own, whose sandboxes are the check's alone."""
    unscoped = {
        name: getattr(settings, name).model_copy(update={"scope": ""})
        for name in ("docker", "e2b", "daytona", "modal", "kubernetes")
    }
    return settings.model_copy(update={"home": settings.home.absolute() / "checks", **unscoped})
