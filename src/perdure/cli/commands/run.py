"""`perdure run`: runs an agent on instances. The same command joins the run again."""

from typing import Any

import click

from perdure.cli.commands.run_options import OPTIONS, play, read, with_options


@click.command()
@with_options(*OPTIONS)
def run(**given: Any) -> None:
    """Run an agent on instances. Repeat the command to join the run again.

    SOURCE is one of:

    \b
    first-steps              a dataset in the store
    first-steps/h11-0.14.0   one instance of it
    swe-bench-verified       a public set of datasets/, loaded at its first use
    rows.jsonl               a file of rows; also .json, .parquet, or a folder
    owner/name[:split]       a dataset on the Hugging Face hub

    Ctrl-C does not stop the run. Exit code 1: a rollout failed, or the budget, --deadline or --stop-at
    ended the run before all rollouts had a verdict.
    """
    play(*read(**given))
