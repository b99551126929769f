"""`perdure report`: the results of runs, as text, JSON or one HTML file."""

import asyncio
from pathlib import Path

import click

from perdure.cli.commands import completion
from perdure.cli.console import json_option


@click.command()
@click.argument(
    "run_ids", metavar="RUN...", nargs=-1, required=True, shell_complete=completion.runs
)
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write one HTML file with plots instead; it needs no network.",
)
@click.option(
    "--prices",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help='TOML: ["MODEL"] with input, output and cached, in dollars per million tokens.',
)
@click.option(
    "--tensorboard",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write TensorBoard event files to DIR instead.",
)
@click.option(
    "--wandb",
    metavar="PROJECT",
    help="Write an offline W&B run to ./wandb instead.",
)
@click.option(
    "--publish",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Write report.json and report.html instead: score, identity and command, without hosts,"
    " paths or keys.",
)
@json_option
def report(
    *,
    run_ids: tuple[str, ...],
    html: Path | None,
    prices: Path | None,
    tensorboard: Path | None,
    wandb: str | None,
    publish: Path | None,
    as_json: bool,
) -> None:
    """Report the results of runs: pass@k, outcomes, failures, tokens, cost, times.

    Each further run is compared with the first, paired by instance. Runs of `oracle` and `nop` over
    the same instances give the upper bound and the floor; without them, calibration gives both. A
    run of `base_suite` gives the upper bound of rows that a whole test suite grades.
    """
    from perdure.cli.runs import run_reports
    from perdure.episodes.output_file import is_standard_output
    from perdure.settings.settings_loader import load_settings

    if html is not None and as_json:
        raise click.UsageError("--html and --json are mutually exclusive: give one of them")
    if publish is not None and (html is not None or as_json):
        raise click.UsageError("--publish writes both files itself: leave out --html and --json")
    settings = load_settings()
    wanted = list(dict.fromkeys(run_ids))
    if publish is not None:
        for path in asyncio.run(run_reports.publish(settings, wanted, prices, publish)):
            click.echo(f"written to {path}")
        return
    if tensorboard is not None or wandb is not None:
        for path in asyncio.run(run_reports.log(settings, run_ids, tensorboard, wandb)):
            click.echo(f"written to {path}")
        return
    made = asyncio.run(run_reports.make(settings, wanted, prices))
    if html is not None:
        run_reports.write_page(made, html)
        click.echo(f"written to {html}", err=is_standard_output(html))
    elif as_json:
        run_reports.print_document(made)
    else:
        run_reports.print_text(made)
        run_reports.print_links(settings, made)
