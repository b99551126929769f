"""`perdure demo`: runs three agents on real instances, prints one table, stops its own stack."""

import asyncio
import base64
import contextlib
import gzip
import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
from perdure.errors import InstanceError
from perdure.settings.settings_loader import load_settings
from perdure.settings.settings_tree import Settings
from perdure.stack import stack_lifecycle
from perdure.types import EpisodeRef, Instance

DATASET = "first-steps"
AGENTS = ("oracle", "nop", "mini_swe_agent")
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


@click.command()
@click.option("--keep-running", is_flag=True, help="Keep the stack running at the end.")
@json_option
def demo(keep_running: bool, as_json: bool) -> None:
    """Build real instances from PyPI, run three agents on them and print one table.

    oracle applies the known fix, nop does nothing, and mini_swe_agent works in a sandbox. It calls
    your model if OPENAI_BASE_URL or ANTHROPIC_BASE_URL is set. Otherwise it calls a scripted policy
    that solves one instance, fails one and gives up on one.
    """
    settings = load_settings()
    stack_lifecycle.require_service()
    started = time.monotonic()
    with print_when_silent("still building from PyPI"):
        instances = signal_cleanup.run(_instances(settings))
    engine = "" if _has_endpoint(settings) else f"scripted:{_write_scripts(settings, instances)}"
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


def _write_scripts(settings: Settings, instances: Sequence[Instance]) -> Path:
    """Write the scripted policy: the model's turns for each instance."""
    path = settings.home.absolute() / "run" / "demo-policy.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(scripts(instances), indent=1))
    return path


def scripts(instances: Sequence[Instance]) -> dict[str, Any]:
    """A policy that solves the smallest instance, fails the next one and gives up on the largest."""
    tries = (_solves, _misses, _gives_up)
    by_size = sorted(instances, key=lambda instance: len(instance.gold_patch))
    return {
        "scripts": [
            {"match": _opening(instance), "turns": tries[index % len(tries)](instance)}
            for index, instance in enumerate(by_size)
        ]
    }


def _opening(instance: Instance) -> str:
    """Text that only this instance's prompt contains."""
    return instance.problem_statement.splitlines()[0]


def _solves(instance: Instance) -> list[dict[str, Any]]:
    packed = base64.b64encode(gzip.compress(instance.gold_patch, mtime=0)).decode()
    return [
        _bash("I look around first.", "git log --oneline | head -3 && ls"),
        _bash("I see the defect and fix it.", f"echo {packed} | base64 -d | gunzip | git apply"),
        _bash("I check what I changed.", "git diff --stat"),
        _bash("That is the fix.", SUBMIT),
    ]


def _misses(instance: Instance) -> list[dict[str, Any]]:
    changed = re.search(rb"^\+\+\+ b/(\S+)", instance.gold_patch, re.MULTILINE)
    file = changed.group(1).decode("utf-8", "replace") if changed else "README"
    return [
        _bash("I look around first.", "git log --oneline | head -3 && ls"),
        _bash("I leave a note where it goes wrong.", f"echo '# TODO: look here' >> '{file}'"),
        _bash("Good enough.", SUBMIT),
    ]


def _gives_up(instance: Instance) -> list[dict[str, Any]]:
    return [
        _bash("I look around first.", "ls"),
        _bash("This is beyond me; I submit nothing.", SUBMIT),
    ]


def _bash(thought: str, command: str) -> dict[str, Any]:
    call = {"name": "bash", "arguments": {"command": command}}
    return {"content": thought, "tool_calls": [call]}
