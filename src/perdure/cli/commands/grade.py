"""`perdure grade`: grades the ungraded patches of a run, or patches that another program made."""

from pathlib import Path
from typing import Any

import click

from perdure.cli.commands import completion
from perdure.cli.commands.run_options import (
    CONCURRENCY,
    NEW,
    NOTIFY,
    RUN_ID,
    SANDBOX,
    SET,
    WAIT,
    with_options,
)
from perdure.cli.console import json_option


@click.command()
@click.argument("source", metavar="RUN|SOURCE", shell_complete=completion.runs_and_datasets)
@click.option(
    *("-p", "--predictions"),
    type=click.Path(path_type=Path),
    metavar="FILE|DIR",
    help="preds.json, JSON lines, or a folder of mini-swe-agent's trajectories.",
)
@click.option(
    "--model",
    default="",
    metavar="NAME",
    help="Grade this model's patches of a file that has several.",
)
@with_options(CONCURRENCY, RUN_ID, NEW, SANDBOX, SET)
@click.option("--skip-unknown", is_flag=True, help="Skip patches of instances not in SOURCE.")
@click.option("--dry-run", is_flag=True, help="Print what would be graded and exit.")
@with_options(WAIT, NOTIFY, json_option)
def grade(
    *,
    source: str,
    predictions: Path | None,
    concurrency: int | None,
    dry_run: bool,
    wait: bool,
    as_json: bool,
    notify: str,
    **options: Any,
) -> None:
    """Grade the ungraded patches of a run, or patches that another program made.

    With RUN, grade the ungraded rollouts of a run that was started with `perdure run --no-grade`.
    Repeat the command to grade the rollouts that are still ungraded. If there are none, it does
    nothing.

    With SOURCE and --predictions, grade the patches in FILE. SOURCE names their instances, as for
    `perdure run`. Several patches for one instance become its samples. Each is applied as swebench
    applies it; `show` names the command that did so. The result is a run: `show`, `export`,
    `report` and `regrade` take its name.

    \b
    perdure grade RUN
    perdure grade swe-bench-verified -p preds.json
    perdure grade rows.jsonl -p mini-swe-agent-output/

    Exit code 1: a patch has no verdict.
    """
    from perdure.cli.runs import prediction_runs, rerun, run_launcher
    from perdure.cli.runs.run_request import fields_of
    from perdure.data_source_handlers import import_handlers
    from perdure.settings.settings_loader import load_settings

    settings = load_settings()
    import_handlers(settings.handlers)
    how: dict[str, Any] = {"wait": wait, "as_json": as_json, "notify": notify}
    sandbox, assignments = options.pop("sandbox"), options.pop("assignments")
    if predictions is None:
        if sandbox or assignments or any(options.values()):
            raise click.UsageError(
                "with RUN, give only -c, --detach, --dry-run, --notify, --json; other options need "
                "--predictions"
            )
        code = rerun.grade_ungraded(
            settings, source, concurrency=concurrency, dry_run=dry_run, **how
        )
    else:
        planned = prediction_runs.plan(
            settings,
            source,
            predictions,
            fields_of(assignments, {"sandbox": sandbox} if sandbox else {}),
            concurrency=concurrency,
            dry_run=dry_run,
            **options,
        )
        if dry_run:
            run_launcher.show(planned, as_json=as_json)
            return
        code = run_launcher.play(settings, planned, **how)
    if code:
        raise click.exceptions.Exit(code)
