"""`perdure status`: shows the stack and its runs, one run with its rollouts, or what is stuck."""

import asyncio
import contextlib
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.commands import completion
from perdure.cli.console import answer, json_option
from perdure.errors import ConfigurationError, NotFound
from perdure.settings.settings_loader import load_settings
from perdure.settings.settings_tree import Settings
from perdure.stack import stack_lifecycle

if TYPE_CHECKING:
    from temporalio.client import Client, WorkflowExecution

    from perdure.client.bottlenecks import Engines
    from perdure.client.rollout_listing import RolloutInfo
    from perdure.client.sdk import Perdure
    from perdure.rollouts.run_label import RunLabel
    from perdure.rollouts.run_record import RunChange
    from perdure.storage.base import Store
    from perdure.types import RunStatus

AT_ONCE = 64
ROWS = 200
"""Rows in a run's table, open rollouts first. A thousand more take a second."""
PATIENCE = timedelta(seconds=1)
"""Timeout of one run's query: a worker may have to replay the run first. After it, we count the
run's rollouts instead."""
STORED = "in the store only"
"""The state of a run that Temporal does not know."""
LISTED_RUNS = 50
LABELS_S = 5.0
"""Seconds to wait for the store. If it does not answer, lists of runs include archived ones."""
STEP_PATIENCE = timedelta(seconds=0.5)
"""Timeout of one rollout's query."""


@click.command()
@click.argument("run_id", metavar="[RUN]", required=False, shell_complete=completion.runs)
@click.option("--stuck", is_flag=True, help="Only rollouts without progress, and what helps.")
@click.option("--tag", metavar="T", help="Only runs with this tag, however old.")
@click.option("--archived", is_flag=True, help="Only archived runs.")
@json_option
def status(
    *, run_id: str | None, stuck: bool, tag: str | None, archived: bool, as_json: bool
) -> None:
    """Show the stack and its runs; with RUN, show its rollouts, open ones first."""
    settings = load_settings()
    if run_id and (tag or archived):
        raise click.UsageError("--tag and --archived choose runs: leave out RUN")
    if stuck:
        asyncio.run(_stuck(settings, run_id, as_json))
    elif tag or archived:
        asyncio.run(_labelled(settings, tag, archived, as_json))
    else:
        asyncio.run(_of_run(settings, run_id, as_json) if run_id else _of_stack(settings, as_json))


async def _stuck(settings: Settings, run_id: str | None, as_json: bool) -> None:
    from perdure.cli.runs import stuck_rollouts, stuck_text
    from perdure.cli.temporal_connection import connect

    connection = await connect(settings)
    perdure = connection.perdure
    found = await stuck_rollouts.find(perdure.client, _store(settings), run_id)
    if run_id and not found.open and await perdure.standalone_rollouts_status(run_id) is None:
        await perdure.run(run_id)  # raises NotFound for a misspelt id
    if as_json:
        return answer(stuck_text.document(found, connection.link))
    for line in stuck_text.lines(found, connection.link):
        click.echo(line)


def _store(settings: Settings) -> "Store | None":
    """None if it cannot be read here: the state of rollouts comes from Temporal."""
    from perdure.errors import PerdureError
    from perdure.storage.store_url import open_store

    with contextlib.suppress(PerdureError):
        return open_store(settings)
    return None


async def _of_stack(settings: Settings, as_json: bool) -> None:
    from perdure.cli.temporal_connection import connect

    connection = await connect(settings)
    labels = await _labels(settings)
    runs, engines = await asyncio.gather(
        _all_runs(connection.perdure, settings, labels), _engines_now(settings)
    )
    rests = [run_id for run_id, label in labels.items() if label.is_deleting]
    what_waits = await _what_waits(connection.perdure.client, engines)
    state = stack_lifecycle.running(settings)
    if as_json:
        answer(
            {
                "stack": None if state is None else _stack_document(state),
                "waits": what_waits,
                "runs": [_run_document(*run) for run in runs],
                "half_deleted": rests,
            }
        )
        return
    from perdure.cli.runs.run_text import listed_line
    from perdure.rollouts.run_label import half_deleted

    if state is not None:
        parts = ", ".join(
            f"{name} (restarted {child.restarts}x: {child.last_exit})" if child.restarts else name
            for name, child in state.children.items()
        )
        click.echo(f"Stack     {state.status}: {parts}")
        if state.ui_url:
            click.echo(f"Web UI    {state.ui_url}")
        click.echo(f"Temporal  {state.temporal_address}")
    if models := models_text(engines):
        click.echo(f"Models    {models}")
    if what_waits:
        click.echo(f"Waits     {what_waits}")
    for run in runs:
        click.echo(listed_line(*run))
    for run_id in rests:
        click.echo(half_deleted(run_id))
    if not runs:
        click.echo("No runs yet: start one with `perdure run first-steps --agent oracle`")


async def _labelled(settings: Settings, tag: str | None, archived: bool, as_json: bool) -> None:
    """The runs that the store has with this tag, or archived."""
    from perdure.cli.runs.run_text import listed_line
    from perdure.cli.temporal_connection import connect

    perdure = (await connect(settings)).perdure
    labels = {
        run_id: label
        for run_id, label in (await _labels(settings)).items()
        if label.archived is archived and (tag is None or tag in label.tags)
        if not label.is_deleting
    }
    progress = await asyncio.gather(*(_known(perdure, settings, one) for one in labels))
    runs = [
        (one, await _began(perdure, one.run_id), await _model(settings, one.run_id), label)
        for one, label in zip(progress, labels.values(), strict=True)
        if one is not None
    ]
    runs.sort(key=lambda run: run[1] or 0.0, reverse=True)
    if as_json:
        return answer({"runs": [_run_document(*run) for run in runs]})
    for run in runs:
        click.echo(listed_line(*run))
    if not runs:
        click.echo(
            "No run matches. `perdure runs edit RUN --tag T` adds a tag; "
            "`perdure runs archive RUN` archives a run."
        )


async def _known(perdure: "Perdure", settings: Settings, run_id: str) -> "RunStatus | None":
    """None for a label whose run is gone, for example by a rule of the bucket."""
    with contextlib.suppress(NotFound):
        return await _progress_of_run(perdure, settings, run_id)
    return None


async def _labels(settings: Settings) -> "Mapping[str, RunLabel]":
    """Empty if the store cannot be read here: the runs' state comes from Temporal."""
    from perdure.errors import PerdureError
    from perdure.rollouts import run_label

    with contextlib.suppress(PerdureError, TimeoutError):
        if (store := _store(settings)) is not None:
            async with asyncio.timeout(LABELS_S):
                return await run_label.read_all(store)
    return {}


async def _all_runs(
    perdure: "Perdure", settings: Settings, labels: "Mapping[str, RunLabel]"
) -> "list[tuple[RunStatus, float, str, RunLabel]]":
    """Progress, start in Unix seconds, model and label of each run, the newest first. Archived and
    half deleted runs are left out."""
    from perdure.client.rollout_listing import began_at
    from perdure.rollouts.run_label import NONE

    hidden = {run_id for run_id, label in labels.items() if label.is_hidden}
    listed = await perdure.runs(LISTED_RUNS + len(hidden))
    found = [one for one in listed if one.id.removeprefix("run/") not in hidden]
    progress = await _progress_of(perdure, found)
    models = await asyncio.gather(*(_model(settings, run.run_id) for run in progress))
    marks = [labels.get(run.run_id, NONE) for run in progress]
    return list(zip(progress, [await began_at(one) for one in found], models, marks, strict=True))


def _run_document(
    progress: "RunStatus", began: float | None, model: str, label: "RunLabel"
) -> dict[str, Any]:
    found = {**progress.model_dump(mode="json"), "started_at": began, "model": model or None}
    return {**found, "label": label.model_dump(mode="json")}


async def _model(settings: Settings, run_id: str) -> str:
    """Empty if the run calls no model, or the store does not say which."""
    from perdure.errors import PerdureError
    from perdure.rollouts.run_record import model_of

    with contextlib.suppress(PerdureError, TimeoutError):
        if (store := _store(settings)) is not None:
            async with asyncio.timeout(PATIENCE.total_seconds()):
                return await model_of(store, run_id)
    return ""


def models_text(engines: "list[Engines]") -> str:
    """The engines of each model; empty if there is only one model."""
    return "; ".join(map(_model_text, engines)) if len(engines) > 1 else ""


def _model_text(engines: "Engines") -> str:
    versions = f" at version {engines.versions}" if engines.versions else ""
    return f"{engines.model}: {engines.ready} ready{versions}"


async def _what_waits(client: "Client", engines: "list[Engines]") -> str:
    """What waits for hosts or engines, and what to add. Empty: nothing waits, or no answer came."""
    from temporalio.service import RPCError

    from perdure.cli.runs.rollout_progress import parked_rollouts
    from perdure.client import bottlenecks
    from perdure.client.deployment_routing import explain_build_routing

    queues, parked = [], ""
    with contextlib.suppress(RPCError):
        if wrong_build := await explain_build_routing(client):
            return wrong_build
        parked = await parked_rollouts(client)
        queues = await bottlenecks.backlogs(client)
    return "; ".join(filter(None, [parked, bottlenecks.sentence(queues, engines)]))


async def _engines_now(settings: Settings) -> "list[Engines]":
    """The engines by model; empty if no gateway answers in time."""
    from perdure.client import bottlenecks
    from perdure.errors import PerdureError

    with contextlib.suppress(PerdureError, TimeoutError):
        async with asyncio.timeout(PATIENCE.total_seconds()):
            return bottlenecks.engines_of(await _engines(settings))
    return []


async def _engines(settings: Settings) -> dict[str, Any]:
    """Engines as reported by this stack's gateway, or by the first gateway that the store names."""
    from perdure.gateway.control_client import GatewayControl
    from perdure.gateway.gateway_addresses import Gateways
    from perdure.home_folder import load_secrets
    from perdure.storage.store_url import open_store

    state, secrets = stack_lifecycle.running(settings), load_secrets(settings)
    if state is not None:
        url = state.gateway_url
    else:
        url = (await Gateways(settings, open_store(settings), secrets).urls())[0]
    async with GatewayControl(url, secrets) as control:
        return await control.engines()


def _stack_document(state: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(state)


async def _progress_of(perdure: "Perdure", runs: "list[WorkflowExecution]") -> "list[RunStatus]":
    """Ask all runs at once: a run whose worker is away or busy answers late or never."""
    from perdure.client.sdk import RunHandle

    room = asyncio.Semaphore(AT_ONCE)

    async def one(found: "WorkflowExecution") -> "RunStatus":
        handle = perdure.client.get_workflow_handle(found.id)
        async with room:
            run = RunHandle(perdure, found.id.removeprefix("run/"), handle)
            return await run.progress(listed=found, patience=PATIENCE)

    return await asyncio.gather(*map(one, runs))


async def _of_run(settings: Settings, run_id: str, as_json: bool) -> None:
    from perdure.cli.temporal_connection import connect, viewer_link
    from perdure.rollouts.run_label import half_deleted

    label = await _label(settings, run_id)
    if label.is_deleting:
        raise ConfigurationError(half_deleted(run_id))
    connection = await connect(settings)
    progressing = _progress_of_run(connection.perdure, settings, run_id)
    if as_json:
        progress, all_of_it = await asyncio.gather(progressing, connection.perdure.rollouts(run_id))
        began = await _began(connection.perdure, run_id)
        document = _run_document(progress, began, await _model(settings, run_id), label)
        changes = [one.model_dump(mode="json") for one in await _changes(settings, run_id)]
        return answer(
            {**document, "changes": changes, "rollouts": [_rollout_document(r) for r in all_of_it]}
        )
    from perdure.cli.console import print_table
    from perdure.cli.runs import run_tables, run_text
    from perdure.cli.runs.rollout_progress import current_steps
    from perdure.client import rollout_listing

    client = connection.perdure.client
    progress, newest, counts, steps = await asyncio.gather(
        progressing,
        rollout_listing.newest(client, run_id, ROWS),
        rollout_listing.count(client, run_id),
        current_steps(client, run_id, STEP_PATIENCE),
    )
    began = await _began(connection.perdure, run_id)
    click.echo(run_text.listed_line(progress, began, await _model(settings, run_id), label))
    if label.note:
        click.echo(f"Note      {label.note}")
    if left := run_text.time_left(progress):
        click.echo(f"Deadline  {left}")
    for change in await _changes(settings, run_id):
        click.echo(run_text.change_line(change))
    if progress.state == STORED:
        click.echo(
            f"Temporal does not know this run, so this is the store's record. `perdure report {run_id}`"
            " shows its results; the command that started it runs the missing rollouts."
        )
    print_table(run_tables.running(newest, rows=ROWS))
    if (more := sum(counts.values()) - ROWS) > 0:
        click.echo(f"{more} more; --json lists all of them")
    for line in run_text.reasons([one.episode for one in newest if one.episode is not None]):
        click.echo(line)
    for line in steps:
        click.echo(line)
    if connection.ui_url:
        click.echo(f"Web UI    {connection.link(f'run/{run_id}')}")
        if counts.get("Failed"):
            click.echo(f"Failed    {connection.failed(run_id)}")
    if viewer := viewer_link(settings, run_id):
        click.echo(f"Viewer    {viewer}")
    click.echo(f"Temporal  {connection.address}")


async def _began(perdure: "Perdure", run_id: str) -> float | None:
    """None for a run that Temporal does not know."""
    from perdure.client.rollout_listing import began_at

    with contextlib.suppress(NotFound):
        return await began_at(await (await perdure.run(run_id)).handle.describe())
    return None


async def _label(settings: Settings, run_id: str) -> "RunLabel":
    """Empty if the store cannot be read here."""
    from perdure.errors import PerdureError
    from perdure.rollouts import run_label

    with contextlib.suppress(PerdureError):
        if (store := _store(settings)) is not None:
            return await run_label.read(store, run_id)
    return run_label.NONE


async def _changes(settings: Settings, run_id: str) -> "list[RunChange]":
    """Empty if the store cannot be read here: the run's state comes from Temporal."""
    from perdure.errors import PerdureError
    from perdure.rollouts.run_record import changes_of

    with contextlib.suppress(PerdureError):
        if (store := _store(settings)) is not None:
            return await changes_of(store, run_id)
    return []


async def _progress_of_run(perdure: "Perdure", settings: Settings, run_id: str) -> "RunStatus":
    """Raises: NotFound if neither the run nor a rollout of it exists."""
    try:
        run = await perdure.run(run_id)
    except NotFound:
        by_hand = await perdure.standalone_rollouts_status(run_id)
        if (found := by_hand or await _as_stored(settings, run_id)) is None:
            raise
        return found
    return await run.progress(patience=PATIENCE)


async def _as_stored(settings: Settings, run_id: str) -> "RunStatus | None":
    """The status of a run that Temporal does not know, for example after its database was lost."""
    from perdure.episodes.episode_store import scan_run_as
    from perdure.episodes.token_accounting import count
    from perdure.errors import PerdureError
    from perdure.rollouts.retry_selection import planned_rollouts
    from perdure.rollouts.run_record import current_request
    from perdure.storage.store_url import open_store
    from perdure.types import RunStatus

    with contextlib.suppress(PerdureError):
        store = open_store(settings)
        request = await current_request(store, run_id)
        ended, _ = await scan_run_as(store, run_id, lambda one: (one.status, one.outcome))
        return RunStatus(
            run_id=run_id,
            state=STORED,
            total=await planned_rollouts(store, request) or len(ended),
            started=len(ended),
            done=len(ended),
            concurrency=request.concurrency,
            by_status=count(status.value for status, _ in ended),
            by_outcome=count(outcome.value for _, outcome in ended if outcome is not None),
        )
    return None


def _rollout_document(found: "RolloutInfo") -> dict[str, Any]:
    episode = found.episode
    return {
        "workflow_id": found.workflow_id,
        "instance_id": found.instance.split("/", 1)[-1],
        "sample_index": found.sample_index,
        "agent": found.agent,
        "stage": found.stage,
        "execution": found.execution,
        "status": episode.status.value if episode else None,
        "outcome": found.outcome or None,
        "reward": episode.reward if episode else None,
        "attempts": episode.attempts if episode else found.attempt,
        "seconds": found.seconds,
        "model": episode.model if episode else None,
        "failure": episode.failure.model_dump(mode="json") if episode and episode.failure else None,
    }
