"""`perdure instances calibrate`: checks a dataset's rows in the sandboxes that will grade them."""

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.commands import completion
from perdure.cli.console import answer, json_option, many, say

if TYPE_CHECKING:
    from perdure.client.sdk import CalibrationHandle
    from perdure.settings.settings_tree import Settings
    from perdure.types import CalibrationRequest, RunStatus

POLL_EVERY_S = 1.0


@click.command()
@click.argument("source", metavar="DATASET", shell_complete=completion.datasets)
@click.option(
    "-i", "--include", multiple=True, metavar="GLOB", help="Only instance ids that match."
)
@click.option(
    "-x", "--exclude", multiple=True, metavar="GLOB", help="Skip instance ids that match."
)
@click.option("-l", "--limit", type=click.IntRange(1), metavar="N", help="At most N instances.")
@click.option("--runs", type=click.IntRange(1, 20), default=3, metavar="N", show_default=True,
              help="Runs per instance with the gold patch, and as many without.")  # fmt: skip
@click.option("--twins", type=click.IntRange(0, 20), default=5, metavar="N", show_default=True,
              help="Twins per FAIL_TO_PASS test; they need about twenty more runs.")  # fmt: skip
@click.option("-c", "--concurrency", type=click.IntRange(1, 2000), default=8, metavar="N",
              show_default=True, help="Rollouts in flight.")  # fmt: skip
@click.option("--sandbox", metavar="S", shell_complete=completion.sandboxes,
              help="Sandbox provider that will grade the rows.  [default: bubblewrap]")  # fmt: skip
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE",
              help="Set any field of a rollout, e.g. limits.memory_mb=8192.")  # fmt: skip
@click.option("--again", is_flag=True, help="Also calibrate instances that have a record.")
@json_option
def calibrate(
    *,
    source: str,
    sandbox: str | None,
    assignments: tuple[str, ...],
    again: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Check the instances of a dataset before they cost GPU time.

    Grades each instance with its gold patch and without a patch, three times each, in the kind of
    sandbox that will grade. Flaky tests are dropped from the lists. If the gold patch does not
    resolve an instance, or the unpatched code does, the instance is quarantined: runs of the
    dataset leave it out.

    Ceiling: the share of runs with the gold patch that resolve, before flaky tests were dropped.
    Floor: the same without a patch.

    Ctrl-C does not stop the calibration; repeat the command to follow it again. Exit code 1: an
    instance is quarantined or undecided.
    """
    from perdure.cli.runs.run_request import fields_of
    from perdure.settings.settings_loader import load_settings

    settings = load_settings()
    fields = fields_of(assignments, {"sandbox": sandbox} if sandbox else {})
    chosen = {**options, "rollout": fields, "round": int(time.time()) if again else 0}
    request = asyncio.run(_request(settings, source, chosen))
    summary = asyncio.run(_drive(settings, request))
    if as_json:
        answer(summary)
    else:
        _print(summary)
    if summary["attention"]:
        raise click.ClickException(f"the calibration stopped: {summary['attention']}")
    if summary["quarantined"] or summary["undecided"]:
        raise click.exceptions.Exit(1)


async def _request(
    settings: "Settings", source: str, chosen: dict[str, Any]
) -> "CalibrationRequest":
    """Check the request and start a stack if none runs.

    Raises: ConfigurationError, pydantic.ValidationError.
    """
    from perdure.cli.runs import instance_selection
    from perdure.cli.runs.run_launcher import ensure_stack_ready
    from perdure.data_source_handlers import import_handlers
    from perdure.instances.rows.row_choice import Choice
    from perdure.storage.store_preflight import check_store
    from perdure.storage.store_url import open_store
    from perdure.types import CalibrationRequest

    import_handlers(settings.handlers)
    await check_store(settings)
    choice = Choice(chosen["include"], chosen["exclude"], chosen["limit"], True)
    found = await instance_selection.resolve(open_store(settings), source, choice)
    for note in found.notes:
        say(note)
    if found.refs is not None and len(found.refs) == 1:
        chosen = {**chosen, "include": (found.refs[0].split("/", 1)[1],)}
    request = CalibrationRequest(dataset=found.dataset, **chosen)
    await asyncio.to_thread(ensure_stack_ready, settings, request.run_request())
    return request


async def _drive(settings: "Settings", request: "CalibrationRequest") -> dict[str, Any]:
    from perdure.cli.temporal_connection import connect

    connection = await connect(settings)
    handle = await connection.perdure.start_calibration(request)
    runs = many(request.runs, "run")
    say(f"Calibrating {request.dataset}: {runs} per instance with the gold patch, as many without")
    say(f"Web UI: {connection.link(handle.handle.id)}" if connection.ui_url else "")
    try:
        return await _followed(handle)
    except asyncio.CancelledError:
        say("\nDetached; the calibration continues. Repeat the command to follow it again.")
        raise


async def _followed(handle: "CalibrationHandle") -> dict[str, Any]:
    """Print the counts whenever they change, until the calibration ends."""
    from temporalio.client import WorkflowQueryFailedError
    from temporalio.service import RPCError

    end, told = asyncio.create_task(handle.result()), ""
    try:
        while not end.done():
            with contextlib.suppress(RPCError, WorkflowQueryFailedError):
                line = _line(await handle.progress())
                if line != told:
                    say(line)
                told = line
            await asyncio.wait({end}, timeout=POLL_EVERY_S)
        return end.result()
    finally:
        end.cancel()


def _line(progress: "RunStatus") -> str:
    """`mine: 2 of 9 instances · proved 2 · 5 rollouts running · choosing twins of 1`."""
    found = [f"{name} {count}" for name, count in progress.by_outcome.items()]
    told = [f"{progress.done} of {many(progress.total, 'instance')}", ", ".join(found)]
    told += [f"{many(progress.running, 'rollout')} running"]
    told += [f"{name} of {count}" for name, count in progress.by_status.items()]
    return f"{progress.run_id}: {' · '.join(filter(None, told))}"


def _print(summary: dict[str, Any]) -> None:
    for why in ("quarantined", "undecided", "without_twins"):
        for ref, reason in summary[f"why_{why}"].items():
            say(f"{why.replace('_', ' ')}  {ref}: {reason}")
    counts = f"{summary['proved']} proved, {summary['quarantined']} quarantined"
    undecided = f", {summary['undecided']} undecided" if summary["undecided"] else ""
    click.echo(f"{many(summary['rows'], 'instance')}: {counts}{undecided}")
    if summary["proved"]:
        of = f"{summary['with_twins']} of {many(summary['proved'], 'proved instance')}"
        click.echo(f"Twins     {of} have one for every FAIL_TO_PASS test")
    if summary["with_twins"]:
        of = f"{summary['under_other_fixes']} of these {summary['with_twins']}"
        click.echo(f"Fixes     all twins of {of} fail under two or more other correct fixes too")
    if summary["dropped_tests"]:
        click.echo(f"Dropped   {many(summary['dropped_tests'], 'flaky test')}")
    if summary["ceiling"] is not None:
        click.echo(f"Ceiling   {summary['ceiling']:.1%} of the runs with the gold patch resolve")
        click.echo(f"Floor     {summary['floor']:.1%} of the runs without a patch resolve")
    if summary["base_passes"] is not None:
        tests = "all PASS_TO_PASS tests pass without a patch"
        click.echo(f"Base      {summary['base_passes']:.1%} of the instances: {tests}")
    click.echo(f"Report    {summary['uri']}")
