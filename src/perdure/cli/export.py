"""`perdure export`: a run's episodes as one file for trainers, graders and spreadsheets."""

import asyncio
from dataclasses import asdict
from pathlib import Path

import click

from perdure.cli import completion, config
from perdure.cli.console import answer, json_option

SUFFIXES = {
    "preds": "json",
    "preds-all": "jsonl",
    "episodes": "parquet",
    "jsonl": "jsonl",
    "sft": "jsonl",
}


@click.command()
@click.argument("run_id", metavar="RUN", shell_complete=completion.runs)
@click.option(
    *("--format", "-f", "format_name"),
    type=click.Choice(list(SUFFIXES)),
    default="preds",
    show_default=True,
)
@click.option(
    *("--out", "-o", "out"),
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write.  [default: RUN.FORMAT.SUFFIX here]",
)
@json_option
def export(run_id: str, format_name: str, out: Path | None, as_json: bool) -> None:
    """Write a run's episodes as one file.

    \b
    preds      predictions of the SWE-bench harness, one patch an instance
    preds-all  the same entries for every graded sample
    episodes   token arrays: one parquet file, one row a segment
    jsonl      the readable episodes, one line a rollout
    sft        the agent's messages with the reward, one line a graded rollout

    What is left out is named on stderr. Exit code 1: the store lost or garbled some of it; the
    rest is written.
    """
    settings = config.load_settings()
    from perdure.episodes.export import export_run
    from perdure.storage.base import open_store

    path = out or Path(f"{run_id}.{format_name}.{SUFFIXES[format_name]}")
    report = asyncio.run(export_run(open_store(settings), run_id, format_name, path))  # type: ignore[arg-type]  # click checked the choice
    for one in report.omitted:
        sample = "" if one.sample_index is None else f" #{one.sample_index}"
        head = "error: left out" if one.damaged else "left out "
        click.echo(f"{head} {one.instance_id}{sample}: {one.reason}", err=True)
    if as_json:
        omitted = [asdict(one) for one in report.omitted]
        written = {"path": str(path), "format": format_name, "written": report.written}
        answer({**written, "omitted": omitted})
    else:
        click.echo(f"{report.written} written to {path}")
    if any(one.damaged for one in report.omitted):
        raise click.exceptions.Exit(1)
