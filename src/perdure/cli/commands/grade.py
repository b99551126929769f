"""`perdure grade`: grades patches that another program made."""

from pathlib import Path

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
@click.argument("source", shell_complete=completion.datasets)
@click.option(
    *("-p", "--predictions"),
    type=click.Path(path_type=Path),
    required=True,
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
    predictions: Path,
    sandbox: str | None,
    assignments: tuple[str, ...],
    wait: bool,
    dry_run: bool,
    as_json: bool,
    notify: str,
    **options: object,
) -> None:
    """Grade patches that another program made.

    SOURCE holds the instances, as for `perdure run`. Several patches for one instance become its
    samples. Each is applied as swebench applies it; `show` says by which command. The result is a
    run: `show`, `export`, `report` and `regrade` take its name.

    \b
    perdure grade swe-bench-verified -p preds.json
    perdure grade rows.jsonl -p mini-swe-agent-output/

    Exit code 1: a patch has no verdict.
    """
    from perdure.cli.runs import prediction_runs, run_launcher
    from perdure.cli.runs.run_request import fields_of
    from perdure.data_source_handlers import import_handlers
    from perdure.settings.settings_loader import load_settings

    fields = fields_of(assignments, {"sandbox": sandbox} if sandbox else {})
    settings = load_settings()
    import_handlers(settings.handlers)
    planned = prediction_runs.plan(
        settings,
        source,
        predictions,
        fields,
        dry_run=dry_run,
        **options,  # type: ignore[arg-type]  # click's own names
    )
    if dry_run:
        run_launcher.show(planned, as_json=as_json)
        return
    code = run_launcher.play(settings, planned, wait=wait, as_json=as_json, notify=notify)
    if code:
        raise click.exceptions.Exit(code)
