"""`perdure adopt`: completes the results of another program."""

from pathlib import Path
from typing import Any

import click

from perdure.cli.commands import completion
from perdure.cli.commands.run_options import NEW, OPTIONS, RUN_ID, read, with_options

SOURCE = OPTIONS[0]
LEFT_OUT = (SOURCE, RUN_ID, NEW)
"""Options of `perdure run` that `adopt` replaces or does not have."""


@click.command()
@click.argument("folder", metavar="FOLDER|FILE", type=click.Path(path_type=Path))
@click.option(
    *("--dataset", "source"),
    required=True,
    metavar="SOURCE",
    shell_complete=completion.datasets,
    help="The instances, as for `perdure run`.",
)
@click.option(
    *("--run", "--run-id", "run_id"), required=True, metavar="NAME", help="Name of the run."
)
@click.option("--by", default="", metavar="NAME", help="Adopt only this agent's or model's work.")
@click.option(
    "--score",
    default="",
    metavar="NAME",
    help="The score that is the verdict: a scorer of Inspect, a reward of Harbor.  [default: the"
    " only one, or `reward`]",
)
@click.option("--skip-unknown", is_flag=True, help="Skip results of instances not in SOURCE.")
@click.option(
    "--reader-python",
    default="",
    metavar="PYTHON",
    help="A Python that has Harbor or Inspect.  [default: uv makes an environment]",
)
@with_options(*(one for one in OPTIONS if one not in LEFT_OUT))
def adopt(
    *, folder: Path, by: str, score: str, skip_unknown: bool, reader_python: str, **given: Any
) -> None:
    """Complete another program's results: keep its verdicts, grade patches and sample the rest.

    FOLDER is a job of Harbor, an output folder of mini-swe-agent, SWE-bench predictions with or
    without reports, or a folder or file of Inspect logs.

    A rollout that already has a verdict ends as `adopted`; Perdure gives it no outcome or reward. A
    patch without a verdict is graded. If an attempt is missing, or an infrastructure failure ended
    it, --agent samples it. Repeat the command to continue.

    \b
    perdure adopt jobs/night --dataset verified --run night --model X
    perdure report night

    Exit codes are those of `perdure run`.
    """
    import asyncio

    from perdure.adoption import result_formats
    from perdure.cli.runs import adopted_runs, run_launcher

    settings, asked, launch = read(**given, new=False)
    reading = result_formats.read(folder, reader_python)
    chosen = adopted_runs.Chosen(by, score, skip_unknown)
    planned = asyncio.run(
        adopted_runs.plan(settings, asked, reading, chosen, dry_run=launch.dry_run)
    )
    if launch.dry_run:
        run_launcher.show(planned, as_json=launch.as_json)
        return
    code = run_launcher.play(
        settings, planned, wait=launch.wait, as_json=launch.as_json, notify=launch.notify
    )
    if code:
        raise click.exceptions.Exit(code)
