"""A run from the command line to its result table; `run` and `demo` share it."""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

import click

from perdure.cli.commands.engines import any_known, none_ready
from perdure.cli.connection import Session, connect
from perdure.cli.console import answer, many, me, print_table, say
from perdure.cli.runs import follow, results, source, tables, text
from perdure.cli.runs.request import (
    Options,
    build,
    check,
    instances_of,
    named_in_phases,
    needs_model,
)
from perdure.client.api import RunHandle
from perdure.errors import ConfigurationError, GatewayUnavailable
from perdure.sandboxes import phases
from perdure.settings.tree import Settings
from perdure.stack import lifecycle
from perdure.stack.plan import configured_engine
from perdure.stack.sandboxes import provider, ready_provider
from perdure.stack.temporal_target import given_address
from perdure.storage import keys
from perdure.storage.base import open_store
from perdure.types import EpisodeRef, RolloutRequest, RolloutStatus, RunRequest

ENGINE_TIMEOUT_S = 5.0
NO_ENGINE = (
    "{agent} calls a model and no engine is configured: set OPENAI_BASE_URL (or ANTHROPIC_BASE_URL, "
    "PERDURE_ENGINE__URL), `perdure down` if a stack runs, and give the same command again"
)

NONE_READY = "warning: no engine is ready, rollouts wait for one: `perdure engines list` says what each lacks"


@dataclass(frozen=True)
class Planned:
    """A validated request and the instances it stands for."""

    request: RunRequest
    refs: Sequence[str]
    joins: bool
    """The store knows this run already."""


def show_plan(settings: Settings, options: Options, *, as_json: bool) -> None:
    """`--dry-run`."""
    planned = asyncio.run(plan(settings, options))
    rollouts = len(planned.refs) * planned.request.n_samples
    if as_json:
        document = {"request": planned.request.model_dump(mode="json", exclude_defaults=True)}
        answer({**document, "instances": list(planned.refs), "rollouts": rollouts})
        return
    of = f"{many(rollouts, 'rollout')} of {many(len(planned.refs), 'instance')}"
    click.echo(f"{planned.request.run_id}: {of}")
    rollout = planned.request.rollout_request("any/instance")
    click.echo(f"  agent {rollout.agent} in {rollout.sandbox}, graded in {_grading(rollout)}")
    for ref in planned.refs:
        click.echo(f"  {ref}")


def run(settings: Settings, options: Options, *, wait: bool, as_json: bool) -> int:
    """The whole command; its exit code. Raises: PerdureError, ValidationError."""
    planned = asyncio.run(plan(settings, options))
    make_ready(settings, planned.request)
    return asyncio.run(_drive(settings, planned, wait=wait, as_json=as_json))


def _grading(rollout: RolloutRequest) -> str:
    return phases.place(rollout, None, "grade").provider


async def plan(settings: Settings, options: Options) -> Planned:
    """Resolve the source and check every option; nothing has started yet."""
    phases.check(check(options), None, partial(provider, settings))
    store = open_store(settings)
    found = await source.resolve(store, options.source, skip_bad_rows=options.skip_bad_rows)
    for note in found.notes:
        say(note)
    request = build(options, found)
    refs = await instances_of(store, request, found)
    await source.keep_list(store, request.run_id, found)
    return Planned(request, refs, await store.exists(keys.run(request.run_id)))


def make_ready(settings: Settings, request: RunRequest) -> None:
    """A stack that can run this: started when none runs, its sandbox and engine checked."""
    if given_address() is not None:
        return  # a cluster's own hosts and engines; its workers tell
    rollout = request.rollout_request("any/instance")
    agent = rollout.agent
    for name in sorted({rollout.sandbox, *named_in_phases(rollout)}):
        ready_provider(settings, name)
    if needs_model(agent):
        _engine_ready(settings, agent)
    lifecycle.ensure_up(settings, "", say)


def _engine_ready(settings: Settings, agent: str) -> None:
    """Before a stack is started for nothing. Raises: ConfigurationError, GatewayUnavailable."""
    state = lifecycle.running(settings)
    engine = configured_engine(settings) if state is None else state.engine
    if engine or not any_known(settings):
        check_engine(engine, agent)
    elif none_ready(settings):
        say(NONE_READY)


def check_engine(engine: str, agent: str) -> None:
    """`engine`: `URL=WEIGHT,URL`; one that answers will do.

    Raises: ConfigurationError when there is none, GatewayUnavailable when nothing answers.
    """
    if not engine:
        raise ConfigurationError(NO_ENGINE.format(agent=agent))
    if not engine.startswith("http"):
        return  # the scripted policy, which the supervisor watches
    failed: OSError | None = None
    for part in engine.split(","):
        address = urlsplit(part.strip().partition("=")[0])
        port = address.port or (443 if address.scheme == "https" else 80)
        try:
            socket.create_connection((address.hostname or "", port), ENGINE_TIMEOUT_S).close()
        except OSError as error:
            failed = error
        else:
            return
    raise GatewayUnavailable(
        f"the engine at {engine} cannot be reached ({failed}): start it, or name another one "
        "and `perdure down` first"
    ) from failed


async def _drive(settings: Settings, planned: Planned, *, wait: bool, as_json: bool) -> int:
    session = await connect(settings)
    handle = await session.perdure.start_run(planned.request)
    if planned.joins:
        say(f"Joined: {text.progress_line(await handle.progress())}")
    else:
        say(f"Started run {handle.run_id}: {many(len(planned.refs), 'instance')}")
    say(f"Web UI: {session.link(f'run/{handle.run_id}')}" if session.ui_url else "")
    if not wait:
        _tell_detached(session, handle.run_id, as_json)
        return 0
    episodes = await to_the_end(settings, handle)
    if as_json:
        answer(results.document(handle.run_id, episodes))
    else:
        show_results(settings, session, handle.run_id, episodes)
    return 1 if any(e.status is RolloutStatus.FAILED for e in episodes) else 0


async def to_the_end(settings: Settings, handle: RunHandle) -> list[EpisodeRef]:
    """Follow a run; Ctrl-C leaves it going and says how to come back."""
    try:
        with follow.shown() as show:
            await follow.follow(handle, show)
    except asyncio.CancelledError:
        say(f"\nDetached; the run goes on. `perdure watch {handle.run_id}` comes back to it,")
        say(f"so does the same command; `perdure cancel {handle.run_id}` ends it.")
        raise
    return await results.episodes(open_store(settings), handle.run_id)


def show_results(
    settings: Settings, session: Session, run_id: str, episodes: Sequence[EpisodeRef]
) -> None:
    """The table, why some failed, where everything lies, and what to do next."""
    print_table(tables.results(episodes))
    for line in text.failures(episodes):
        say(f"no reward  {line}")
    facts = {
        "Web UI": session.link(f"run/{run_id}"),
        "Episodes": f"{open_store(settings).url}/runs/{run_id}",
    }
    for name, value in facts.items():
        if value:
            click.echo(f"{name:<9} {value}")
    first = f"{episodes[0].instance_id}/{episodes[0].sample_index}" if episodes else "INSTANCE"
    click.echo(f"Next      {me()} show {run_id}/{first}")
    if any(episode.turns for episode in episodes):
        click.echo(f"          {me()} show {run_id}/{first} --turns")
    click.echo(f"          {me()} export {run_id} --format preds")


def _tell_detached(session: Session, run_id: str, as_json: bool) -> None:
    if as_json:
        answer({"run_id": run_id, "web_ui": session.link(f"run/{run_id}")})
    else:
        click.echo(f"`perdure watch {run_id}` follows it.")
