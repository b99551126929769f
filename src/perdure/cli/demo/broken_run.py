"""`perdure demo --break`: starts a stack with an engine behind a proxy, breaks each part, sums up."""

import asyncio
import contextlib
import re
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from perdure.cli.console import answer, invoked_command, many, print_when_silent, say
from perdure.cli.demo import (
    engine_process,
    engine_proxy,
    faults,
    left_behind,
    scripted_agents,
    small_disk,
)
from perdure.cli.demo.break_summary import BreakSummary, sessions_of
from perdure.cli.demo.engine_process import EngineProcess
from perdure.cli.demo.engine_proxy import EngineProxy
from perdure.cli.demo.faults import Hit, Targets
from perdure.cli.demo.left_behind import Traces
from perdure.cli.demo.small_disk import SmallDisk
from perdure.cli.runs import run_follower, run_text
from perdure.cli.temporal_connection import connect
from perdure.client.sdk import RunHandle
from perdure.client.temporal_server import configured_address
from perdure.episodes.episode import Episode
from perdure.episodes.episode_store import scan_run_as
from perdure.errors import ConfigurationError, MissingDependency
from perdure.settings.settings_tree import EngineSettings, Settings, SlotSettings
from perdure.stack import stack_lifecycle
from perdure.storage import store_keys
from perdure.storage.base import Store
from perdure.storage.store_url import open_store
from perdure.types import Instance, RolloutRequest, RunRequest

AGENT = "mini_swe_agent"
SAMPLES = 2
PATIENCE_S = 900.0
"""The demo engine's `hang_s`. It is long because calls also wait for the next fault."""
CANCEL_S = 20.0
SETTLE_S = 60.0
"""Seconds that the last clean-ups may take after the run has ended."""
BLOB = re.compile(r"blobs/sha256/[0-9a-f/]+")
TITLE, WHAT = 20, 30
"""Widths of columns."""


def check(settings: Settings) -> None:
    """Raises: ConfigurationError if the parts to kill are not the demo's own."""
    if configured_address(settings) is not None:
        raise ConfigurationError(
            "`demo --break` kills Temporal, so it uses only a server of its own: unset "
            "TEMPORAL_ADDRESS and TEMPORAL_PROFILE"
        )
    if stack_lifecycle.running(settings) is not None:
        raise ConfigurationError(
            f"a stack runs in {settings.home}, and `demo --break` kills parts of its own stack: run "
            "`perdure down` first, or set another PERDURE_HOME"
        )


async def play(settings: Settings, instances: Sequence[Instance], *, as_json: bool) -> None:
    """Raises: click.exceptions.Exit if anything was wrong or left behind; NotRecovered."""
    started = time.monotonic()
    home = settings.home.absolute()
    before = left_behind.traces(home, (), stack=True)
    async with contextlib.AsyncExitStack() as parts:
        broken = await _prepared(parts, settings, instances)
        hits = await _break(broken)
        episodes = await _finish(broken)
        left = await _settled(broken, before)
    left |= left_behind.traces(home, broken.sandboxes, stack=True) - before
    summary = BreakSummary(
        rollouts=len(broken.rollouts),
        episodes=episodes,
        right=scripted_agents.right_outcomes(instances),
        hits=hits,
        calls=len(broken.proxy.calls),
        left=left,
    )
    seconds = time.monotonic() - started
    _show(settings, broken.handle.run_id, summary, seconds, as_json=as_json)
    if summary.problems:
        raise click.exceptions.Exit(1)


@dataclass(frozen=True)
class BrokenRun:
    """A run with its stack, engine, proxy and disk. `settings`: the stack's. `store`: the user's
    own store, which receives the results."""

    settings: Settings
    store: Store
    handle: RunHandle
    rollouts: Sequence[RolloutRequest]
    proxy: EngineProxy
    engine: EngineProcess
    disk: SmallDisk | None

    @property
    def names(self) -> dict[str, str]:
        """`<instance id> #<sample>` of each rollout, by `Call.rollout`."""
        return {
            sessions_of(one.run_id, one.workflow_id): f"{one.instance_id} #{one.sample_index}"
            for one in self.rollouts
        }

    @property
    def sandboxes(self) -> list[str]:
        """Name prefixes of all its sandboxes."""
        return [name.removesuffix("agent") for name in self.names]


async def _prepared(
    parts: contextlib.AsyncExitStack, settings: Settings, instances: Sequence[Instance]
) -> BrokenRun:
    """Start everything, from the file system to the run."""
    home, looks = settings.home.absolute(), faults.turns(with_disk=True)
    scripts = scripted_agents.write(settings, scripted_agents.long_policy(instances, looks))
    disk = await _disk(parts, home / "run" / small_disk.MOUNT_POINT)
    ours = settings.model_copy(
        update={
            "engine": EngineSettings(kind="vllm", hang_s=PATIENCE_S),
            "slots": SlotSettings(),
            "store": str(disk.path / "store") if disk else settings.store,
        }
    )
    store = open_store(settings)
    if disk:
        await _copy(store, open_store(ours), await _keys_of(store, instances))
    engine = await parts.enter_async_context(
        engine_process.running(scripts, home / "logs" / "engine.log")
    )
    proxy = await parts.enter_async_context(engine_proxy.serving(engine.url))
    await parts.enter_async_context(_stack(ours, proxy.url))
    request = RunRequest(
        run_id=f"demo-break-{time.strftime('%m%d-%H%M%S')}",
        instances=tuple(instance.ref for instance in instances),
        n_samples=SAMPLES,
        concurrency=SAMPLES * len(instances),
        rollout={"agent": AGENT},
    )
    handle = await parts.enter_async_context(_started(ours, request))
    rollouts = [
        request.rollout_request(ref, sample)
        for ref in request.instances
        for sample in range(SAMPLES)
    ]
    return BrokenRun(ours, store, handle, rollouts, proxy, engine, disk)


@contextlib.asynccontextmanager
async def _started(settings: Settings, request: RunRequest) -> AsyncIterator[RunHandle]:
    """Start a run. Cancel it if the demo is interrupted, because its store ends with the demo."""
    handle = await (await connect(settings)).perdure.start_run(request)
    try:
        yield handle
    except BaseException:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(CANCEL_S):
                await handle.cancel()
        raise


async def _disk(parts: contextlib.AsyncExitStack, folder: Path) -> SmallDisk | None:
    """Mount a small file system. If this user may not, print a line and return None."""
    try:
        return await parts.enter_async_context(small_disk.mounted(folder))
    except MissingDependency as error:
        say(f"Skipped: a full file system, because this user cannot mount one ({error}).")
        return None


@contextlib.asynccontextmanager
async def _stack(settings: Settings, engine_url: str) -> AsyncIterator[None]:
    try:
        with print_when_silent("still starting"):
            await asyncio.to_thread(stack_lifecycle.ensure_up, settings, engine_url, say)
        yield
    finally:
        with print_when_silent("still stopping"):
            await asyncio.to_thread(stack_lifecycle.shut_down, settings, say)


async def _break(broken: BrokenRun) -> dict[str, Hit]:
    """Play every fault while all agents work, and print a line for each. Returns hits by title."""
    targets = Targets(
        settings=broken.settings,
        client=broken.handle.perdure.client,
        workflow_ids=[one.workflow_id for one in broken.rollouts],
        rollouts=broken.names,
        proxy=broken.proxy,
        engine=broken.engine,
        disk=broken.disk,
    )
    chosen = faults.chosen(with_disk=broken.disk is not None)
    say(f"{many(len(broken.rollouts), 'agent')} of {AGENT} start ...")
    broken.proxy.allow(faults.TURNS_EACH)
    with print_when_silent("still starting"):
        await faults.all_call(targets)
    say(f"All agents work. {many(len(chosen), 'fault')} follow, each with its recovery time:")
    hits: dict[str, Hit] = {}
    for number, fault in enumerate(chosen):
        with print_when_silent("still recovering"):
            hit = hits[fault.title] = await faults.strike(targets, fault, number)
        say(f"  {fault.title:<{TITLE}}{hit.what:<{WHAT}}{hit.seconds:5.1f} s  {hit.went_on}")
    return hits


async def _finish(broken: BrokenRun) -> list[Episode]:
    """Let the agents end and be graded. The user's store gets the results."""
    say("All agents continued. Waiting until they finish and are graded ...")
    broken.proxy.allow(sys.maxsize)
    with run_follower.shown() as show, print_when_silent("still running"):
        await run_follower.follow(broken.handle, show)
    run_id, store = broken.handle.run_id, open_store(broken.settings)
    if broken.disk:
        results = [key async for key in store.list(store_keys.run_prefix(run_id))]
        await _copy(store, broken.store, results)
    episodes, _ = await scan_run_as(store, run_id, lambda episode: episode)
    return episodes


async def _settled(broken: BrokenRun, before: Traces) -> Traces:
    """Give the last clean-ups time, then return what remains. The stack still runs, because
    stopping it would remove everything."""
    home, deadline = broken.settings.home.absolute(), time.monotonic() + SETTLE_S
    with print_when_silent("still looking for what was left behind"):
        while True:
            left = left_behind.traces(home, broken.sandboxes, stack=False) - before
            if not left or time.monotonic() > deadline:
                return left
            await asyncio.sleep(faults.LOOK_S)


async def _keys_of(store: Store, instances: Sequence[Instance]) -> list[str]:
    """Everything that the store has about these instances."""
    keys = []
    for instance in instances:
        keys.append(store_keys.instance(instance.ref))
        keys += set(BLOB.findall(instance.model_dump_json()))
        calibrations = store_keys.calibrations(instance.dataset)
        keys += [key async for key in store.list(f"{calibrations}{instance.instance_id}/")]
    return keys


async def _copy(source: Store, target: Store, keys: Sequence[str]) -> None:
    for key in keys:
        await target.put_if_absent(key, (await source.get(key)).data)


def _show(
    settings: Settings, run_id: str, summary: BreakSummary, seconds: float, *, as_json: bool
) -> None:
    if as_json:
        answer({"run_id": run_id, "seconds": round(seconds, 1), **summary.document()})
        return
    for line in summary.lines():
        click.echo(line)
    for problem in summary.problems:
        click.echo(f"Wrong         {problem}")
    click.echo(f"{many(len(summary.hits), 'fault')} in {run_text.clock(seconds)}")
    click.echo(f"Episodes      {settings.store_url}/runs/{run_id}")
    first = summary.episodes[0]
    where = f"{run_id}/{first.instance_id}/{first.sample_index}"
    click.echo(f"Next          {invoked_command()} show {where} --turns")
