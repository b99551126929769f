"""`perdure demo`: runs three agents on real instances, prints one table, stops its own stack."""

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

import click

from perdure.cli import signal_cleanup
from perdure.cli.console import (
    answer,
    invoked_command,
    json_option,
    many,
    print_table,
    print_when_silent,
    say,
)
from perdure.cli.demo import scripted_agents
from perdure.errors import InstanceError
from perdure.settings.settings_loader import load_settings
from perdure.settings.settings_tree import Settings
from perdure.stack import stack_lifecycle
from perdure.types import EpisodeRef, Instance

DATASET = "first-steps"
AGENTS = ("oracle", "nop", "mini_swe_agent")


@click.command()
@click.option("--keep-running", is_flag=True, help="Keep the stack running at the end.")
@click.option(
    "--break",
    "breaks",
    is_flag=True,
    help="Kill and refuse each part of a stack while agents work, and print what that cost.",
)
@json_option
def demo(keep_running: bool, breaks: bool, as_json: bool) -> None:
    """Build real instances from PyPI, run three agents on them and print one table.

    oracle applies the known fix, nop does nothing, and mini_swe_agent works in a sandbox. It calls
    your model if OPENAI_BASE_URL or ANTHROPIC_BASE_URL is set. Otherwise it calls a scripted policy
    that solves one instance, fails one and gives up on one.

    With --break it kills an agent's sandbox, a worker, the gateway, the engine and Temporal, answers
    401 and 504, and fills a file system of its own. The model is always scripted. Exit code 1: a
    rollout was graded wrong, too much was paid twice, or something was left behind.
    """
    settings = load_settings()
    stack_lifecycle.require_service()
    started = time.monotonic()
    if breaks:
        _break(settings, keep_running=keep_running, as_json=as_json)
        return
    instances = _build(settings)
    engine = "" if _has_endpoint(settings) else f"scripted:{_write_policy(settings, instances)}"
    with print_when_silent("still starting"):
        state, ours = stack_lifecycle.ensure_up(settings, engine, say)
    say(f"Web UI: {state.ui_url}")
    say(f"Temporal: {state.temporal_address}")
    try:
        episodes = asyncio.run(_run_all(settings, instances))
    finally:
        if ours and not keep_running:
            with print_when_silent("still stopping"):
                stack_lifecycle.shut_down(settings, say)
    if as_json:
        from perdure.cli.runs import run_results

        answer(run_results.document("demo", episodes))
        return
    _show(settings, episodes, state.ui_url, time.monotonic() - started)


def _break(settings: Settings, *, keep_running: bool, as_json: bool) -> None:
    from perdure.cli.demo import broken_run

    if keep_running:
        raise click.UsageError(
            "--break stops its stack, which depends on the demo's engine: leave out --keep-running"
        )
    broken_run.check(settings)
    instances = _build(settings)
    signal_cleanup.run(broken_run.play(settings, instances, as_json=as_json))


def _write_policy(settings: Settings, instances: Sequence[Instance]) -> Path:
    return scripted_agents.write(settings, scripted_agents.policy(instances))


def _build(settings: Settings) -> list[Instance]:
    with print_when_silent("still building from PyPI"):
        return signal_cleanup.run(_instances(settings))


async def _instances(settings: Settings) -> list[Instance]:
    from perdure.cli.commands.instances import build_dataset

    built = await build_dataset(settings, DATASET, demo=True)
    good = [one.instance for one in built if one.instance is not None]
    if not good:
        raise InstanceError(f"no instance could be built: {built[0].problem}")
    return good


def _has_endpoint(settings: Settings) -> bool:
    from perdure.engines.reported_model import named_engine

    return bool(named_engine(settings).url)


async def _run_all(settings: Settings, instances: Sequence[Instance]) -> list[EpisodeRef]:
    """One run per agent, all at the same time, followed together."""
    from perdure.cli.runs import run_follower, run_results
    from perdure.cli.temporal_connection import connect
    from perdure.storage.store_url import open_store
    from perdure.types import RunRequest

    connection = await connect(settings)
    stamp = time.strftime("%m%d-%H%M%S")
    refs = tuple(instance.ref for instance in instances)
    requests = [
        RunRequest(
            run_id=f"demo-{agent}-{stamp}",
            instances=refs,
            concurrency=os.cpu_count() or 1,
            rollout={"agent": agent},
        )
        for agent in AGENTS
    ]
    handles = [await connection.perdure.start_run(request) for request in requests]
    # The live view already shows the elapsed time.
    live = run_follower.console.is_terminal
    talking = contextlib.nullcontext() if live else print_when_silent("still running")
    with run_follower.shown() as show, talking:
        await asyncio.gather(*(run_follower.follow(handle, show) for handle in handles))
    store = open_store(settings)
    found = [await run_results.episodes(store, handle.run_id) for handle in handles]
    return sorted((e for one in found for e in one), key=lambda e: AGENTS.index(e.agent))


def _show(settings: Settings, episodes: Sequence[EpisodeRef], ui_url: str, seconds: float) -> None:
    from perdure.cli.runs import run_tables, run_text

    print_table(run_tables.results(episodes))
    for line in (*run_text.differences(episodes), *run_text.failures(episodes)):
        say(f"no reward  {line}")
    last = episodes[-1]
    run_id = re.sub(r"^.*/runs/([^/]+)/.*$", r"\1", last.uri)
    click.echo(f"{many(len(episodes), 'graded rollout')} in {run_text.clock(seconds)}")
    click.echo(f"Episodes  {settings.store_url}/runs")
    click.echo(f"Web UI    {ui_url} (while `{invoked_command()} up` runs)")
    click.echo(f"Next      {invoked_command()} show {run_id}/{last.instance_id}")
    click.echo(f"          {invoked_command()} up")
    click.echo(
        f"          {invoked_command()} run {DATASET}/{last.instance_id} --agent oracle -n 4"
    )
