"""`perdure sweep`: one run for each combination of agents, models and other fields."""

import asyncio
from typing import Any

import click

from perdure.cli.commands.run_options import OPTIONS, RUN_ID, read, say_estimate, with_options

VARY = click.option(
    "--vary",
    multiple=True,
    required=True,
    metavar="KEY=V,V",
    help="Values of agent, model, or any field of a rollout, e.g. sampling.temperature=0,0.7.",
)


@click.command()
@with_options(VARY, *(option for option in OPTIONS if option is not RUN_ID))
def sweep(vary: tuple[str, ...], **given: Any) -> None:
    """Run each combination of values, and compare the runs in one table.

    SOURCE and options are those of `perdure run`. The runs start at once and share --concurrency.
    Repeat the command to join them again.

    \b
    perdure sweep lite --vary agent=codex,opencode --vary model=a,b

    Ctrl-C does not stop the runs. Exit code 1: a rollout failed, or a run ended before all rollouts
    had a verdict.
    """
    from perdure.cli.runs import run_launcher, run_sweep

    combinations = run_sweep.combinations(vary)
    runs = []
    for values in combinations:
        options = run_sweep.command_line(given, values, len(combinations))
        settings, asked, launch = read(run_id=None, **options)
        planned = asyncio.run(run_launcher.plan(settings, asked, dry_run=launch.dry_run))
        runs.append(run_sweep.SweptRun(values, planned))
        if (launch.dry_run or launch.like) and not launch.as_json:
            say_estimate(settings, planned, launch)
    if launch.dry_run:
        return run_sweep.show(runs, as_json=launch.as_json)
    if code := run_sweep.play(settings, runs, launch):
        raise click.exceptions.Exit(code)
