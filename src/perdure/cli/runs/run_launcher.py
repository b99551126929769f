"""Starts a run, follows it and prints its results."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

import click

from perdure import tracing, variant_registry
from perdure.agents.base import ChecksHost
from perdure.cli import calibration_labels
from perdure.cli.console import answer, invoked_command, many, print_table, say
from perdure.cli.runs import instance_selection, run_follower, run_results, run_tables, run_text
from perdure.cli.runs.completion_command import run_completion_command
from perdure.cli.runs.run_request import (
    RunOptions,
    build,
    check,
    instances_of,
    named_in_phases,
    needs_model,
)
from perdure.cli.temporal_connection import Connection, connect, viewer_link
from perdure.client.sdk import RunHandle
from perdure.client.temporal_server import configured_address
from perdure.engines.reported_model import engine_settings, named_engine
from perdure.errors import ActionNeeded, GatewayUnavailable, NoResult
from perdure.instances import image_plan, instance_catalog, row_interpreter
from perdure.instances.calibration_record import Mark, quarantined
from perdure.instances.environment_builder import check_image
from perdure.instances.image_plan import Bounds, ImagePlan, plan_images
from perdure.instances.rows.formats.harbor import PERMITS_NETWORK
from perdure.instances.rows.row_choice import Choice
from perdure.rollouts import run_identity, run_label
from perdure.rollouts.request_models import check_models
from perdure.rollouts.run_record import current_request
from perdure.sandboxes import phase_specs
from perdure.sandboxes.base import Network
from perdure.settings.settings_tree import Settings
from perdure.stack import home_providers, stack_lifecycle
from perdure.stack.engine_presence import (
    check_engine,
    check_same_engine,
    has_added_engines,
    has_no_ready_engine,
)
from perdure.stack.home_providers import provider, ready_provider
from perdure.storage import store_keys
from perdure.storage.base import Store
from perdure.storage.store_preflight import check_store
from perdure.storage.store_url import open_store
from perdure.types import (
    EpisodeRef,
    Instance,
    PhaseName,
    RolloutRequest,
    RolloutStatus,
    RunRequest,
)

AGENT_AND_GRADE: tuple[PhaseName, ...] = ("agent", "grade")
NONE_READY = (
    "warning: no engine is ready, so rollouts wait for one: `perdure engines list` says why"
)


@dataclass(frozen=True)
class CheckedRun:
    """A validated request and the instances that it selects."""

    request: RunRequest
    refs: Sequence[str]
    rollouts: int
    joins: bool
    """The store already has this run."""
    added: int = 0
    """Instances that this run lacks."""
    marks: Mapping[str, Mark] = field(default_factory=dict)
    """Calibration of `refs`, and of quarantined instances that are left out."""
    notes: Sequence[str] = ()
    """Calibration and images as text."""
    images: Sequence[ImagePlan] = ()
    """One for each sandbox provider that the run uses on this host, if it boots images and is ready."""


def show(planned: CheckedRun, *, as_json: bool) -> None:
    """Print what would run."""
    for note in planned.notes:
        say(note)
    if as_json:
        answer(document(planned))
        return
    of = f"{many(planned.rollouts, 'rollout')} of {many(len(planned.refs), 'instance')}"
    click.echo(f"{planned.request.run_id}: {of}")
    rollout = planned.request.rollout_request("any/instance")
    grading = phase_specs.place(rollout, None, "grade").provider
    click.echo(f"  agent {rollout.agent} in {rollout.sandbox}, graded in {grading}")
    for ref in planned.refs:
        click.echo(f"  {ref}{calibration_labels.label_mark(planned.marks[ref])}")


def document(planned: CheckedRun) -> dict[str, Any]:
    """What would run, as JSON."""
    return {
        "request": planned.request.model_dump(mode="json", exclude_defaults=True),
        "instances": list(planned.refs),
        "rollouts": planned.rollouts,
        "not_calibrated": [ref for ref in planned.refs if planned.marks[ref].state is None],
        "quarantined": quarantined(planned.marks),
        "images": [asdict(one) for one in planned.images],
    }


def play(
    settings: Settings, planned: CheckedRun, *, wait: bool, as_json: bool, notify: str = ""
) -> int:
    """Start a checked run and follow it; return the exit code. `notify`: as for `to_the_end`."""
    ensure_stack_ready(settings, planned.request, joins=planned.joins)
    for note in planned.notes:
        say(note)
    return asyncio.run(_drive(settings, planned, wait, as_json, notify))


async def plan(settings: Settings, options: RunOptions, *, dry_run: bool = False) -> CheckedRun:
    """Check every option and find the instances. This starts nothing. `dry_run`: as for `checked`."""
    phase_specs.check(check(options), None, partial(provider, settings))
    await check_store(settings)
    store = open_store(settings)
    choice = Choice(options.include, options.exclude, options.limit, options.skip_bad_rows)
    found = await instance_selection.resolve(store, options.source, choice)
    for note in found.notes:
        say(note)
    return await checked(settings, options, found, dry_run=dry_run)


async def checked(
    settings: Settings,
    options: RunOptions,
    found: instance_selection.Selection,
    *,
    dry_run: bool = False,
) -> CheckedRun:
    """The request for these instances, with their calibration. `dry_run`: registries get more time
    to report the images' sizes."""
    store = open_store(settings)
    request = build(options, found)
    refs, marked = await instances_of(store, request, found)
    sandbox = phase_specs.place(request.rollout_request("any/instance"), None, "grade").provider
    notes = calibration_labels.notes(found.dataset, sandbox, refs, marked)
    images: Sequence[ImagePlan] = ()
    if configured_address(settings) is None:  # otherwise the workers run on other machines
        instances = [await instance_catalog.load(store, ref) for ref in refs]
        _check_images(settings, request, instances)
        notes += _network_notes(request, instances)
        bounds = image_plan.BEFORE_START if dry_run else image_plan.AT_START
        images = await _image_plans(settings, request, instances, bounds)
        notes += _image_notes(images, found.dataset, with_complete=dry_run)
        await row_interpreter.check(instances)
    await run_label.check_not_deleting(store, request.run_id)
    await instance_selection.keep_list(store, request.run_id, found)
    joins = await store.exists(store_keys.run(request.run_id))
    added: Mapping[str, str] = {}
    if joins:
        added = await check_same(settings, store, request, refs)
        request = await _with_current(store, request)
    rollouts = len(refs) * request.n_samples
    return CheckedRun(request, refs, rollouts, joins, len(added), marked, notes, images)


def _check_images(settings: Settings, request: RunRequest, instances: Sequence[Instance]) -> None:
    """Raises: ConfigurationError for a row whose image its sandbox provider cannot run."""
    rollout = request.rollout_request("any/instance")
    for instance in instances:
        for phase in AGENT_AND_GRADE:
            name = phase_specs.place(rollout, instance, phase).provider
            check_image(instance, provider(settings, name))


def _network_notes(request: RunRequest, instances: Sequence[Instance]) -> list[str]:
    """A note about tasks whose authors allowed a network that their sandboxes do not get."""
    count = sum(bool(instance.metadata.get(PERMITS_NETWORK)) for instance in instances)
    rollout = request.rollout_request("any/instance")
    places = (phase_specs.place(rollout, None, phase) for phase in AGENT_AND_GRADE)
    if not count or all(place.network is not Network.NONE for place in places):
        return []
    return [
        f"{many(count, 'task')} may use a network in Harbor; here agent and tests have none, so "
        "install what they need in the Dockerfile (docs/sandboxes.md#sandbox-phases)"
    ]


async def _image_plans(
    settings: Settings, request: RunRequest, instances: Sequence[Instance], bounds: Bounds
) -> Sequence[ImagePlan]:
    """For each provider of the agents and the tests."""
    rollout = request.rollout_request("any/instance")
    names = {
        phase_specs.place(rollout, instance, phase).provider
        for instance in instances
        for phase in AGENT_AND_GRADE
    }
    used = [provider(settings, name) for name in sorted(names)]
    mirror, store = settings.sandbox.image_mirror, open_store(settings)
    plans = [
        await plan_images(instances, one, rollout, store, bounds=bounds, mirror=mirror)
        for one in used
        if one.runs_images and not one.check()
    ]
    return [one for one in plans if one.images]


def _image_notes(plans: Sequence[ImagePlan], dataset: str, *, with_complete: bool) -> list[str]:
    """Which images are missing, their bytes, and the command that prepares them. `with_complete`: also
    plans in which nothing is missing."""
    notes = []
    for one in plans:
        if with_complete or one.to_pull or one.to_build:
            notes += one.lines()
        if one.preparable:
            notes.append(
                f"  `{invoked_command()} images prepare {dataset} --sandbox {one.provider}` gets them "
                "before the run"
            )
    return notes


async def _with_current(store: Store, request: RunRequest) -> RunRequest:
    """Fields that the command line does not give keep the run's current value."""
    current = await current_request(store, request.run_id)
    kept = {
        name: getattr(current, name)
        for name in current.CHANGEABLE
        if name not in request.model_fields_set
    }
    return request.model_copy(update=kept)


async def check_same(
    settings: Settings, store: Store, request: RunRequest, refs: Sequence[str]
) -> Mapping[str, str]:
    """Refuse now a request that the run's first activity would refuse; a joined run never gets it.

    Returns the instances that the run lacks, with their digests.
    Raises: ConfigurationError, which names the differences.
    """
    rollout = request.rollout_request("any/instance")
    engine: Mapping[str, str] = {}
    if (
        needs_model(rollout.agent) and configured_address(settings) is None
    ):  # otherwise the engines run on other machines
        state = stack_lifecycle.running(settings)
        engine = state.engine_settings if state is not None else engine_settings(settings)
    asked = await run_identity.identity_of(settings, store, rollout, refs, engine)
    return await run_identity.check(store, request.run_id, asked)


def ensure_stack_ready(
    settings: Settings, request: RunRequest, *, joins: bool = False, samples: bool = True
) -> None:
    """Check sandbox providers and engine; start a stack if none runs.

    `joins`: the run has begun, so an engine that does not answer is only a warning.
    `samples`: False if no agent will call a model.
    """
    if configured_address(settings) is not None:
        return  # a cluster's workers check its hosts and engines
    rollout = request.rollout_request("any/instance")
    agent = rollout.agent
    harness = variant_registry.load("agent", variant_registry.AGENTS, agent)()
    if isinstance(harness, ChecksHost):
        harness.check_host(settings.agents)
    for name in sorted({rollout.sandbox, *named_in_phases(rollout)}):
        ready_provider(settings, name)
    if samples and needs_model(agent):
        try:
            _engine_ready(settings, agent)
        except GatewayUnavailable as error:
            if not joins:
                raise
            say(f"warning: open rollouts wait for the engine: {error}")
        if not joins:
            _check_models_known(settings, rollout)
    stack_lifecycle.ensure_up(settings, "", say)


def _check_models_known(settings: Settings, rollout: RolloutRequest) -> None:
    """Raises: ConfigurationError if no engine has a model that the request names."""
    state = stack_lifecycle.running(settings)
    engine = engine_settings(settings) if state is None else state.engine_settings
    asyncio.run(check_models(settings, open_store(settings), rollout, engine))


def _engine_ready(settings: Settings, agent: str) -> None:
    """Check the engine before a stack is started. Raises: ConfigurationError, GatewayUnavailable."""
    state = stack_lifecycle.running(settings)
    if state is not None:
        check_same_engine(settings, state)
    engine = named_engine(settings).url if state is None else state.engine
    if engine or not has_added_engines(settings):
        check_engine(engine, agent)
    elif has_no_ready_engine(settings):
        say(NONE_READY)


async def _drive(
    settings: Settings, planned: CheckedRun, wait: bool, as_json: bool, notify: str
) -> int:
    connection = await connect(settings)
    handle = await start(settings, connection, planned)
    if not wait:
        print_watch_command(connection, handle.run_id, as_json)
        return 0
    return await watch_run(settings, connection, handle, as_json=as_json, notify=notify)


async def start(settings: Settings, connection: Connection, planned: CheckedRun) -> RunHandle:
    """Start or join a checked run, and print what happened and where to see it."""
    with tracing.span("perdure run", {"perdure.run_id": planned.request.run_id}, root=True):
        handle = await connection.perdure.start_run(planned.request, has_new_rows=planned.added > 0)
    if handle.changes:
        say(f"Changed: {', '.join(handle.changes)}")
    elif planned.added:
        say(
            f"{many(planned.added, 'new instance')} of the dataset: repeat the command when the run has"
            " ended"
        )
    if planned.joins:
        say(f"Joined: {run_text.progress_line(await handle.progress())}")
    else:
        say(f"Started run {handle.run_id}: {many(len(planned.refs), 'instance')}")
    print_run_links(settings, connection, handle.run_id)
    return handle


async def watch_run(
    settings: Settings, connection: Connection, handle: RunHandle, *, as_json: bool, notify: str
) -> int:
    """Follow a run and print its results; return the exit code of `perdure run` and `watch`."""
    episodes, stopped, interrupted = await follow_run(settings, handle, notify=notify)
    left = await run_results.read_unfinished(open_store(settings), handle.run_id) if stopped else []
    if as_json:
        answer(run_results.document(handle.run_id, episodes, stopped, left, interrupted))
    else:
        show_results(settings, connection, handle.run_id, episodes, interrupted)
        for line in run_text.unfinished_lines(left):
            say(f"unfinished  {line}")
        if stopped:
            say(stopped)
    return 1 if stopped or any(e.status is RolloutStatus.FAILED for e in episodes) else 0


class RunEnd(NamedTuple):
    """A run's episodes. `stopped`: a sentence if its budget, deadline or `stop_at` ended it.
    `interrupted`: a sentence if something interrupted its rollouts."""

    episodes: list[EpisodeRef]
    stopped: str = ""
    interrupted: str = ""


async def follow_run(settings: Settings, handle: RunHandle, *, notify: str = "") -> RunEnd:
    """Follow a run; at Ctrl-C print how to follow it again.

    `notify`: a shell command to run when the run ends or waits for a person.
    """
    try:
        with run_follower.shown() as show:
            progress = await run_follower.follow(handle, show)
    except (ActionNeeded, NoResult) as error:
        await run_completion_command(notify, handle.run_id, str(error))
        raise
    except asyncio.CancelledError:
        say(f"\nDetached; the run continues. `perdure watch {handle.run_id}` follows it again,")
        say(f"and so does the same command; `perdure cancel {handle.run_id}` ends it.")
        raise
    await run_completion_command(notify, handle.run_id, run_text.progress_line(progress))
    stopped = run_text.stopped(progress)
    episodes, found = await run_results.episodes_and_interruptions(
        open_store(settings), handle.run_id
    )
    left = await _left_behind(settings, handle.run_id) if found else None
    return RunEnd(episodes, stopped, found.line(left))


async def _left_behind(settings: Settings, run_id: str) -> int | None:
    """The run's sandboxes on this host; None if its workers run on other machines."""
    if configured_address(settings) is not None:
        return None
    return await home_providers.count_sandboxes(settings, {"run": run_id})


def show_results(
    settings: Settings,
    connection: Connection,
    run_id: str,
    episodes: Sequence[EpisodeRef],
    interrupted: str = "",
) -> None:
    """Print the results, why rollouts failed, where the files are and what to do next."""
    print_table(run_tables.results(episodes))
    if interrupted:
        say(interrupted)
    for line in (*run_text.differences(episodes), *run_text.failures(episodes)):
        say(f"no reward  {line}")
    without = any(e.status is RolloutStatus.FAILED for e in episodes)
    facts = {
        "Web UI": connection.link(f"run/{run_id}"),
        "Failed": connection.failed(run_id) if without else "",
        "Viewer": viewer_link(settings, run_id),
        "Temporal": connection.address,
        "Episodes": f"{open_store(settings).url}/runs/{run_id}",
    }
    for name, value in facts.items():
        if value:
            click.echo(f"{name:<9} {value}")
    first = f"{episodes[0].instance_id}/{episodes[0].sample_index}" if episodes else "INSTANCE"
    if any(one.status is RolloutStatus.UNGRADED for one in episodes):
        click.echo(f"Grade     {invoked_command()} grade {run_id}")
    click.echo(f"Next      {invoked_command()} show {run_id}/{first}")
    if any(episode.turns for episode in episodes):
        click.echo(f"          {invoked_command()} show {run_id}/{first} --turns")
    click.echo(f"          {invoked_command()} view {run_id}")
    click.echo(f"          {invoked_command()} export {run_id} --format preds")


def print_run_links(settings: Settings, connection: Connection, run_id: str) -> None:
    """Print where to see a run: in the browser and with the `temporal` command."""
    if connection.ui_url:
        say(f"Web UI: {connection.link(f'run/{run_id}')}")
    if viewer := viewer_link(settings, run_id):
        say(f"Viewer: {viewer}")
    say(f"Temporal: {connection.address}")


def print_watch_command(connection: Connection, run_id: str, as_json: bool) -> None:
    if as_json:
        answer({"run_id": run_id, "web_ui": connection.link(f"run/{run_id}")})
    else:
        click.echo(f"`perdure watch {run_id}` follows it.")
